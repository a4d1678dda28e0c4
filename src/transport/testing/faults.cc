#include "transport/testing/faults.h"

#include <algorithm>
#include <set>
#include <sstream>

#include "transport/collectives.h"
#include "transport/testing/fault_ops.h"

namespace interlace {

namespace {

constexpr int64_t kSecond = 1'000 * kMs;
constexpr double kMeetS = 20;
constexpr int64_t kLimitNs = 400 * kSecond;
constexpr int64_t kSlackNs = 150 * kMs;  // turns of the others, and the ends of waits in whole milliseconds

// Of an error that a mesh gave: whom it names, by number in the group.
std::vector<int> NamedIn(const std::string& error) {
  std::vector<int> out;
  size_t at = error.find("on axis dp: ");
  if (at == std::string::npos) return out;
  if (const size_t self = error.find("stopped waiting for this rank ("); self != std::string::npos)
    return {std::stoi(error.substr(error.find('(', self) + 1))};
  std::istringstream words(error.substr(at + 12));
  std::string word;
  while (words >> word && (out.empty() || word == "and" || std::isdigit(word[0]) != 0)) {
    if (std::isdigit(word[0]) != 0) out.push_back(std::stoi(word));
  }
  return out;
}

class Run {
 public:
  Run(const FaultCase& one, const RunOptions& options)
      : case_(one), options_(options), turns_(one.seed ^ 0x5eed, kLimitNs), network_(turns_, one.seed ^ 0xfa17, one.network) {
    network_.KeepTrace(options.keep_trace);
    out_.ranks.resize(one.size);
    ended_.resize(one.size);
    if (one.kind == FaultCase::kStream) network_.faults().push_back(one.fault);
    if (one.note_fault) network_.faults().push_back(*one.note_fault);
  }

  FaultRun Go() {
    std::vector<std::function<void()>> works;
    for (int rank = 0; rank < case_.size; ++rank) works.emplace_back([this, rank] { Rank(rank); });
    for (int i = 0; i < case_.strangers; ++i) works.emplace_back([this, i] { Stranger(i); });
    turns_.Run(works);
    if (case_.kind == FaultCase::kStream) out_.struck = network_.faults()[0].struck;
    Judge();
    out_.trace = network_.trace();
    out_.digest = network_.digest();
    out_.calls = network_.calls();
    return std::move(out_);
  }

 private:
  void Rank(int rank);
  void Operate(int rank, std::shared_ptr<Mesh> mesh);
  void Stranger(int i);
  Result<std::vector<std::string>> Exchange(int rank, const std::string& mine);
  void Begin();
  void Judge();
  void Problem(const std::string& text) { out_.problems.push_back(text); }
  std::set<int> Allowed() const;
  std::set<int> Guilty() const;
  bool Says(const std::string& error) const;

  const FaultCase& case_;
  const RunOptions options_;
  Turns turns_;
  Network network_;
  FaultRun out_;
  // The exchange of a few bytes that ranks meet by.
  std::vector<std::vector<std::string>> said_;  // by round
  int here_ = 0;
  std::vector<bool> ended_;
  int met_ = 0;
  bool begun_ = false;
};

Result<std::vector<std::string>> Run::Exchange(int rank, const std::string& mine) {
  const size_t round = static_cast<size_t>(here_ / case_.size);
  const int all = (here_ / case_.size + 1) * case_.size;
  said_.resize(round + 1, std::vector<std::string>(case_.size));
  said_[round][rank] = mine;
  ++here_;
  turns_.Wait([this, all] { return here_ >= all; }, turns_.now() + static_cast<int64_t>(kMeetS * 1e9));
  if (here_ < all) return MakeError("a rank did not come");
  return said_[round];
}

// What happens at a time: counted from when the first rank begins, or from when all have met.
void Run::Begin() {
  const auto strike = [this](auto what) {
    turns_.At(turns_.now() + case_.when_ns, [this, what] {
      if (ended_[case_.culprit]) return;
      out_.struck = true;
      what();
    });
  };
  switch (case_.kind) {
    case FaultCase::kCut:
      strike([this] { network_.Cut(case_.culprit, case_.other, case_.cuts_data, case_.cuts_control); });
      break;
    case FaultCase::kKill:
      strike([this] { network_.Kill(case_.culprit); });
      if (case_.second_ns > 0) turns_.At(turns_.now() + case_.second_ns, [this] { network_.Kill(case_.other); });
      break;
    case FaultCase::kStall:
      strike([this] { turns_.Stop(case_.culprit, kNever); });
      break;
    case FaultCase::kHiccup:
      strike([this] { turns_.Stop(case_.culprit, turns_.now() + case_.for_ns); });
      break;
    case FaultCase::kCutOff:
      strike([this] {
        for (int rank = 0; rank < case_.size; ++rank) {
          if (rank != case_.culprit) network_.Separate(case_.culprit, rank);
        }
      });
      break;
    case FaultCase::kSeparate:
      strike([this] { network_.Separate(case_.culprit, case_.other); });
      break;
    default:
      break;
  }
}

void Run::Rank(int rank) {
  RankEnd& end = out_.ranks[rank];
  std::vector<int64_t> ranks;
  for (int i = 0; i < case_.size; ++i) ranks.push_back(i);
  const RankGroup group{"dp", ranks, rank};
  const bool early = case_.seed % 8 == 0;  // it may strike while they meet
  if (early && !begun_) Begin();
  begun_ = begun_ || early;
  Result<std::vector<PeerSockets>> sockets =
      ConnectPeers(group, [&](const std::string& mine) { return Exchange(rank, mine); }, kMeetS, network_);
  if (!sockets.ok()) {
    end.error = sockets.error().ToString();
  } else {
    end.met = true;
    if (++met_ == case_.size && !early) Begin();
    for (int peer = 0; peer < case_.size && (case_.keyed || options_.encrypts); ++peer) {
      if (peer == rank) continue;
      const auto key = [](int from, int to) { return std::string(31, static_cast<char>('a' + from)) + std::to_string(to); };
      (*sockets)[peer].send_key = key(rank, peer);
      (*sockets)[peer].receive_key = key(peer, rank);
      (*sockets)[peer].encrypts = options_.encrypts;
    }
    Operate(rank, std::make_shared<Mesh>(group, std::move(*sockets),
                                         MeshOptions{.lost_patience_ms = options_.lost_patience_ms,
                                                     .silent_patience_ms = options_.silent_patience_ms,
                                                     .helper = false,
                                                     .calls = &network_}));
  }
  if (end.end_ns == 0) end.end_ns = turns_.now();
  ended_[rank] = true;
  network_.Log("ends" + (end.error.empty() ? "" : ": " + end.error));
}

void Run::Operate(int rank, std::shared_ptr<Mesh> mesh) {
  RankEnd& end = out_.ranks[rank];
  Draw draw(case_.seed * 31 + static_cast<uint64_t>(rank));
  std::vector<std::unique_ptr<FaultOp>> ops;
  std::vector<std::pair<Ticket, size_t>> open;
  Collectives group(mesh, case_.timeout_s * options_.waits_longer);
  const auto failed = [&](const Error& error) {
    end.error = error.ToString();
    end.named = NamedIn(end.error);
    end.end_ns = turns_.now();
    turns_.Sleep(draw.Below(200 * kMs));  // a process takes a while to end
  };
  for (size_t i = 0; i < case_.ops.size() || !open.empty(); ++i) {
    if (i < case_.ops.size()) {
      if (case_.kind == FaultCase::kLeave && rank == case_.culprit && i == case_.leaves_at) {
        out_.struck = true;
        group.Leave();
        return failed(MakeError("left"));
      }
      if (const int64_t compute_ns = case_.ops[i].compute_ns[rank]; compute_ns > 0) {
        turns_.Sleep(compute_ns / 2);
        if (draw.OneIn(2)) group.Progress();
        turns_.Sleep(compute_ns / 2);
      }
      ops.push_back(std::make_unique<FaultOp>(case_, i, rank));
      const Result<Ticket> ticket = ops.back()->Start(group);
      if (!ticket.ok()) return failed(ticket.error());
      if (*ticket != 0) open.emplace_back(*ticket, i);
      if (open.size() < case_.window && i + 1 < case_.ops.size()) continue;
    }
    while (!open.empty() && (open.size() >= case_.window || i + 1 >= case_.ops.size())) {
      const auto next = open.begin() + draw.Below(static_cast<int64_t>(open.size()));
      const auto [ticket, number] = *next;
      open.erase(next);
      end.waited_from_ns = turns_.now();
      const Status waited = group.Wait(ticket);
      const int64_t took = turns_.now() - end.waited_from_ns;
      const int64_t most = static_cast<int64_t>(case_.timeout_s * 1e9) +
                           (MeshOptions{}.lost_patience_ms + MeshOptions{}.silent_patience_ms) * kMs + kSlackNs;
      if (took > most) end.late = "waited " + std::to_string(took / kMs) + " ms for op " + std::to_string(number);
      if (!waited.ok()) return failed(waited.error());
      if (const std::string wrong = ops[number]->Check(); !wrong.empty()) end.wrong = wrong;
    }
  }
  end.end_ns = turns_.now();
}

// Comes while ranks meet, and says nothing or something else.
void Run::Stranger(int i) {
  Draw draw(case_.seed * 37 + static_cast<uint64_t>(i));
  turns_.Sleep(draw.OfAnySize(kMs));
  const int port = network_.ListenerOf(static_cast<int>(draw.Below(case_.size)));
  if (port < 0) return;
  sockaddr_storage there{};
  socklen_t size = sizeof there;
  network_.NameOf(port, reinterpret_cast<sockaddr*>(&there), &size);
  Socket socket(network_.Open(AF_INET), network_);
  network_.Connect(socket.fd(), reinterpret_cast<sockaddr*>(&there), size);
  turns_.Sleep(draw.OfAnySize(5 * kMs));
  std::string words(static_cast<size_t>(draw.Below(60)), '\0');
  for (char& c : words) c = static_cast<char>(draw.Bits());
  if (draw.OneIn(2)) words.replace(0, std::min<size_t>(4, words.size()), "ILM1", std::min<size_t>(4, words.size()));
  if (!words.empty()) network_.SendBytes(socket.fd(), words.data(), words.size(), 0);
  turns_.Sleep(draw.OfAnySize(50 * kMs));
}

// Whom an error may name.
std::set<int> Run::Allowed() const {
  if (!out_.struck) return {};
  std::set<int> out = Guilty();
  if (const auto& faults = network_.faults(); !out.empty() && case_.note_fault && faults.back().struck)
    out.insert(case_.note_fault->from);
  return out;
}

std::set<int> Run::Guilty() const {
  switch (case_.kind) {
    case FaultCase::kNone:
    case FaultCase::kHiccup:
      return {};
    case FaultCase::kStream:
      if (case_.fault.kind == StreamFault::kDelay) return {};
      if (case_.fault.kind == StreamFault::kFlip || case_.fault.kind == StreamFault::kInsert ||
          case_.fault.kind == StreamFault::kRepeat || case_.fault.kind == StreamFault::kReorder)
        return {case_.fault.from};
      return {case_.fault.from, case_.fault.to};
    case FaultCase::kCut:
    case FaultCase::kSeparate:
      return {case_.culprit, case_.other};
    case FaultCase::kKill:
      if (case_.second_ns > 0) return {case_.culprit, case_.other};
      return {case_.culprit};
    default:
      return {case_.culprit};
  }
}

// Whether the error tells what happened, where that can be known.
bool Run::Says(const std::string& error) const {
  const auto has = [&](const char* part) { return error.find(part) != std::string::npos; };
  if (case_.note_fault && network_.faults().back().struck) return true;
  if (case_.kind == FaultCase::kKill || case_.kind == FaultCase::kLeave) return has(" lost after ");
  if (case_.kind == FaultCase::kStall) return has(" did not answer for ");
  if (case_.kind == FaultCase::kStream && case_.fault.kind == StreamFault::kFlip)
    return has(" damaged on the way") || has(" started another operation");
  return true;
}

void Run::Judge() {
  if (turns_.over()) Problem("a rank hangs");
  const std::set<int> allowed = Allowed();
  const bool all_met = met_ == case_.size;
  int64_t first_ns = kNever;  // error
  for (int rank = 0; rank < case_.size; ++rank) {
    if (case_.kind == FaultCase::kCutOff && rank == case_.culprit) continue;  // nobody can hear of its error
    if (!out_.ranks[rank].error.empty()) first_ns = std::min(first_ns, out_.ranks[rank].end_ns);
  }
  for (int rank = 0; rank < case_.size; ++rank) {
    const RankEnd& end = out_.ranks[rank];
    const std::string who = "rank " + std::to_string(rank) + ": ";
    const bool one_rank = case_.kind == FaultCase::kKill || case_.kind == FaultCase::kStall ||
                          case_.kind == FaultCase::kCutOff || case_.kind == FaultCase::kLeave;
    const bool ill = (rank == case_.culprit && (one_rank || case_.kind == FaultCase::kHiccup)) ||
                     (rank == case_.other && case_.kind == FaultCase::kKill && case_.second_ns > 0);
    if (!end.wrong.empty()) Problem(who + end.wrong);
    if (!end.late.empty() && !ill) Problem(who + end.late);
    if (end.error.empty()) continue;
    if (allowed.empty()) Problem(who + "has an error without a fault: " + end.error);
    if (!all_met || (ill && case_.kind != FaultCase::kStall)) continue;
    if (!ill && !Says(end.error)) Problem(who + "says something else: " + end.error);
    if (end.named.empty()) Problem(who + "names nobody: " + end.error);
    if (ill && case_.note_fault) continue;  // it may have missed what the others say of it
    for (const int named : end.named) {
      if (allowed.count(named) == 0 && !allowed.empty()) Problem(who + "blames an innocent rank: " + end.error);
    }
    const bool cut = case_.kind == FaultCase::kSeparate && (rank == case_.culprit || rank == case_.other);
    if (!ill && !cut && end.end_ns > first_ns + 1'300 * kMs) Problem(who + "learned of it late");
  }
}

}  // namespace

FaultRun RunCase(const FaultCase& one, const RunOptions& options) {
  return Run(one, options).Go();
}

}  // namespace interlace
