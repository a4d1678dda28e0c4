#include "transport/collectives.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/clock.h"

namespace interlace {

namespace {

// Whoever goes waits so long for what it had started.
constexpr double kDropPatienceS = 5;
// From here on an all-reduce between more than two ranks is cheaper in two rounds: it moves 2 (n-1)/n of its bytes each
// way and not n-1 times them, for one more exchange.
constexpr int64_t kLargeBytes = int64_t{64} << 10;
constexpr int64_t kPartElements = 32;  // parts of an all-reduce begin at multiples of it

enum Kind : int32_t { kGather, kReduce, kAllReduce, kAllToAll, kBroadcast, kSend };

// Bytes that a piece takes in a receive buffer: pieces begin at multiples of 64 bytes.
int64_t Padded(int64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

TypedSpan Part(const TypedSpan& whole, int64_t begin, int64_t elements) {
  return {whole.data + begin * DTypeBytes(whole.dtype), elements, whole.dtype};
}

PeerSpan PeerSpanOf(int peer, const TypedSpan& buffer) {
  return {peer, buffer.data, static_cast<size_t>(buffer.bytes())};
}

// Part i of `size`, which begin at multiples of kPartElements.
TypedSpan EqualPart(const TypedSpan& whole, int size, int i) {
  const int64_t each = ((whole.elements + size - 1) / size + kPartElements - 1) / kPartElements * kPartElements;
  const int64_t begin = std::min(i * each, whole.elements);
  return Part(whole, begin, std::min(each, whole.elements - begin));
}

bool InTwoRounds(int size, const TypedSpan& value) {
  return size > 2 && value.bytes() >= kLargeBytes;
}

// What comes from each other of `ranks` for `out` goes to a place of its own in the receive buffer, and `out` becomes
// the sum of these and of `own`, in their order. Gives the place behind.
char* AddUp(const std::vector<int>& ranks, int self, const TypedSpan& own, const TypedSpan& out, char* receive,
            Round& round) {
  LocalSum sum{out.dtype, {}, out.data, out.elements};
  for (int rank : ranks) {
    if (rank == self) {
      sum.parts.push_back(own.data);
      continue;
    }
    round.receives.push_back(PeerSpanOf(rank, {receive, out.elements, out.dtype}));
    sum.parts.push_back(receive);
    receive += Padded(out.bytes());
  }
  round.sums.push_back(std::move(sum));
  return receive;
}

// `value` becomes the sum over `ranks`, in the rounds from `first` on.
char* AllReduce(const std::vector<int>& ranks, int self, const TypedSpan& value, char* receive,
                std::vector<Round>& rounds, size_t first) {
  const auto size = static_cast<int>(ranks.size());
  const bool in_two = InTwoRounds(size, value);
  rounds.resize(std::max(rounds.size(), first + (in_two ? 2 : 1)));
  const auto index = static_cast<int>(std::find(ranks.begin(), ranks.end(), self) - ranks.begin());
  const TypedSpan own = in_two ? EqualPart(value, size, index) : value;
  for (int i = 0; i < size; ++i) {
    if (i == index) continue;
    const TypedSpan part = in_two ? EqualPart(value, size, i) : value;
    rounds[first].sends.push_back(PeerSpanOf(ranks[i], part));
    if (!in_two) continue;
    rounds[first + 1].sends.push_back(PeerSpanOf(ranks[i], own));
    // The rank has all of this part before it sends its sum: nothing is overwritten that has not gone.
    rounds[first + 1].receives.push_back(PeerSpanOf(ranks[i], part));
  }
  return AddUp(ranks, self, own, own, receive, rounds[first]);
}

std::vector<int> AllOf(const RankGroup& group) {
  std::vector<int> ranks(group.ranks.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

Collectives::~Collectives() {
  // After an error on this rank alone the peers may never do their part, hence the short patience.
  while (!open_.empty()) {
    if (!WaitFor(open_.begin()->first, std::min(timeout_s_, kDropPatienceS)).ok()) break;
  }
}

int64_t Collectives::ReceiveBytes(int size, const std::vector<TypedSpan>& shards) {
  int64_t bytes = 0;
  for (const TypedSpan& shard : shards) bytes += Padded(shard.bytes()) * (size - 1);
  return bytes;
}

int64_t Collectives::GridReceiveBytes(const RankGrid& grid, const std::vector<TypedSpan>& shards) {
  const auto across = static_cast<int>(grid.across.size());
  int64_t bytes = ReceiveBytes(static_cast<int>(grid.within.size()), shards);
  for (const TypedSpan& shard : shards) bytes += AllReduceReceiveBytes(across, shard);
  return bytes;
}

int64_t Collectives::GridScatterBytes(const RankGrid& grid, const std::vector<TypedSpan>& shards) {
  const auto row = static_cast<int64_t>(grid.within.size()), column = static_cast<int64_t>(grid.across.size());
  int64_t bytes = 0;
  // The row's parts for this column, the sums of all but the own one, and what the column sends for that one.
  for (const TypedSpan& shard : shards) bytes += Padded(shard.bytes()) * ((row - 1) * column + 2 * (column - 1));
  return bytes;
}

int64_t Collectives::AllReduceReceiveBytes(int size, const TypedSpan& value) {
  return ReceiveBytes(size, {InTwoRounds(size, value) ? EqualPart(value, size, 0) : value});
}

Error Collectives::Misfit(const Open& open, const std::string& what) const {
  return MakeError(open.operation.label, " on axis ", group().axis, ": ", what);
}

Result<Ticket> Collectives::StartGather(const std::vector<TypedSpan>& shards, const std::vector<TypedSpan>& fulls,
                                        std::string label) {
  return StartGather(shards, fulls, {AllOf(group()), {group().index}}, std::move(label));
}

Result<Ticket> Collectives::StartGather(const std::vector<TypedSpan>& shards, const std::vector<TypedSpan>& fulls,
                                        const RankGrid& grid, std::string label) {
  const int self = group().index;
  auto open = std::make_unique<Open>();
  const bool columns = grid.across.size() > 1;
  open->operation = {
      .label = std::move(label), .kind = kGather, .everyone = !columns, .rounds = std::vector<Round>(columns ? 2 : 1)};
  Round &along_column = open->operation.rounds.front(), &along_row = open->operation.rounds.back();
  if (shards.size() != fulls.size()) return Misfit(*open, "as many shards as full buffers are needed");
  for (size_t i = 0; i < shards.size(); ++i) {
    const int64_t elements = shards[i].elements;
    if (fulls[i].elements != elements * group().size() || fulls[i].dtype != shards[i].dtype)
      return Misfit(*open, "the full buffer does not have the elements of all shards");
    const auto place = [&](int rank) { return Part(fulls[i], rank * elements, elements); };
    open->copies.push_back({shards[i].data, place(self).data, shards[i].bytes()});
    for (int peer : grid.across) {
      if (peer == self) continue;
      along_column.sends.push_back(PeerSpanOf(peer, shards[i]));
      along_column.receives.push_back(PeerSpanOf(peer, place(peer)));
    }
    for (int peer : grid.within) {
      if (peer == self) continue;
      for (int below : grid.across) {
        along_row.sends.push_back(PeerSpanOf(peer, below == self ? shards[i] : place(below)));
        along_row.receives.push_back(PeerSpanOf(peer, place(peer + below - self)));
      }
    }
  }
  return Start(std::move(open));
}

// One shard's part of a reduce on a grid of which every rank has a shard. Takes its share of `receive`.
void Collectives::ScatterOnGrid(const TypedSpan& flat, const TypedSpan& shard, const RankGrid& grid, char*& receive,
                                std::vector<Round>& rounds) const {
  const int self = group().index;
  const size_t columns = grid.within.size(), rows = grid.across.size();
  const auto part = [&](size_t column, size_t row) {
    const size_t place = grid.nested ? column * rows + row : row * columns + column;
    return Part(flat, static_cast<int64_t>(place) * shard.elements, shard.elements);
  };
  size_t own = 0;  // its column
  for (size_t column = 0; column < columns; ++column) {
    if (grid.within[column] == self) own = column;
    for (size_t row = 0; row < rows && grid.within[column] != self; ++row)
      rounds[0].sends.push_back(PeerSpanOf(grid.within[column], part(column, row)));
  }
  for (size_t row = 0; row < rows; ++row) {
    TypedSpan sum = shard;
    if (grid.across[row] != self) {
      sum.data = receive;
      receive += Padded(sum.bytes());
      rounds[1].sends.push_back(PeerSpanOf(grid.across[row], sum));
    }
    receive = AddUp(grid.within, self, part(own, row), sum, receive, rounds[0]);
  }
  receive = AddUp(grid.across, self, shard, shard, receive, rounds[1]);
}

Result<Ticket> Collectives::StartReduce(const std::vector<TypedSpan>& flats, const std::vector<TypedSpan>& shards,
                                        char* receive, std::string label) {
  return StartReduce(flats, shards, {AllOf(group()), {group().index}}, receive, std::move(label));
}

Result<Ticket> Collectives::StartReduce(const std::vector<TypedSpan>& flats, const std::vector<TypedSpan>& shards,
                                        const RankGrid& grid, char* receive, std::string label) {
  const int self = group().index;
  const auto row = static_cast<int>(grid.within.size());
  const auto index = static_cast<int>(std::find(grid.within.begin(), grid.within.end(), self) - grid.within.begin());
  const bool scatters = grid.across.size() > 1 && !shards.empty() && !flats.empty() &&
                        flats[0].elements == shards[0].elements * group().size();
  auto open = std::make_unique<Open>();
  open->operation = {
      .label = std::move(label), .kind = kReduce, .everyone = row == group().size(), .rounds = std::vector<Round>(1)};
  std::vector<Round>& rounds = open->operation.rounds;
  if (shards.size() != flats.size()) return Misfit(*open, "as many shards as full buffers are needed");
  for (size_t i = 0; i < shards.size(); ++i) {
    const int64_t elements = shards[i].elements;
    if (flats[i].elements != elements * (scatters ? group().size() : row) || flats[i].dtype != shards[i].dtype)
      return Misfit(*open, "the full buffer does not have the elements of all shards");
    if (!CanSum(shards[i].dtype)) return Misfit(*open, "no sum of " + std::string(DTypeName(shards[i].dtype)));
    if (scatters) {
      rounds.resize(2);
      ScatterOnGrid(flats[i], shards[i], grid, receive, rounds);
      continue;
    }
    for (int k = 0; k < row; ++k) {
      if (k != index) rounds[0].sends.push_back(PeerSpanOf(grid.within[k], Part(flats[i], k * elements, elements)));
    }
    receive = AddUp(grid.within, self, Part(flats[i], index * elements, elements), shards[i], receive, rounds[0]);
  }
  if (grid.across.size() < 2 || scatters) return Start(std::move(open));
  // In memory of its own: a faster row's sums may come before this row's are made.
  for (const TypedSpan& shard : shards) receive = AllReduce(grid.across, self, shard, receive, rounds, 1);
  return Start(std::move(open));
}

Result<Ticket> Collectives::StartAllReduce(const TypedSpan& value, char* receive, std::string label) {
  auto open = std::make_unique<Open>();
  open->operation = {.label = std::move(label), .kind = kAllReduce};
  if (!CanSum(value.dtype)) return Misfit(*open, "no sum of " + std::string(DTypeName(value.dtype)));
  AllReduce(AllOf(group()), group().index, value, receive, open->operation.rounds, 0);
  return Start(std::move(open));
}

Result<Ticket> Collectives::StartAllToAll(const std::vector<TypedSpan>& to, const std::vector<TypedSpan>& from,
                                          std::string label) {
  auto open = std::make_unique<Open>();
  open->operation = {.label = std::move(label), .kind = kAllToAll, .rounds = std::vector<Round>(1)};
  Round& round = open->operation.rounds[0];
  if (to.size() != group().ranks.size() || from.size() != group().ranks.size())
    return Misfit(*open, "a part for each rank and a part of each rank are needed");
  const TypedSpan &own = to[group().index], &target = from[group().index];
  if (own.bytes() != target.bytes()) return Misfit(*open, "what stays on this rank has two sizes");
  open->copies.push_back({own.data, target.data, own.bytes()});
  for (int rank = 0; rank < group().size(); ++rank) {
    if (rank == group().index) continue;
    round.sends.push_back(PeerSpanOf(rank, to[rank]));
    round.receives.push_back(PeerSpanOf(rank, from[rank]));
  }
  return Start(std::move(open));
}

Result<Ticket> Collectives::StartBroadcast(const TypedSpan& value, int root, std::string label) {
  auto open = std::make_unique<Open>();
  open->operation = {.label = std::move(label), .kind = kBroadcast, .everyone = false, .rounds = std::vector<Round>(1)};
  Round& round = open->operation.rounds[0];
  if (root < 0 || root >= group().size()) return Misfit(*open, "no rank " + std::to_string(root) + " to send it");
  if (root != group().index) round.receives.push_back(PeerSpanOf(root, value));
  for (int rank = 0; rank < group().size() && root == group().index; ++rank) {
    if (rank != root) round.sends.push_back(PeerSpanOf(rank, value));
  }
  return Start(std::move(open));
}

Result<Ticket> Collectives::StartSend(const TypedSpan& value, int peer, std::string label, std::string tag) {
  return StartMessage(value, peer, std::move(label), std::move(tag), &Round::sends, "send to");
}

Result<Ticket> Collectives::StartRecv(const TypedSpan& value, int peer, std::string label, std::string tag) {
  return StartMessage(value, peer, std::move(label), std::move(tag), &Round::receives, "receive from");
}

Result<Ticket> Collectives::StartMessage(const TypedSpan& value, int peer, std::string label, std::string tag,
                                         std::vector<PeerSpan> Round::*side, const char* what) {
  auto open = std::make_unique<Open>();
  open->operation = {.label = std::move(label),
                     .tag = std::move(tag),
                     .kind = kSend,
                     .everyone = false,
                     .rounds = std::vector<Round>(1)};
  if (peer < 0 || peer >= group().size() || peer == group().index)
    return Misfit(*open, "no other rank " + std::to_string(peer) + " to " + what);
  (open->operation.rounds[0].*side).push_back(PeerSpanOf(peer, value));
  return Start(std::move(open));
}

Result<Ticket> Collectives::Start(std::unique_ptr<Open> open) {
  Operation& operation = open->operation;
  if (operation.tag.empty()) operation.tag = operation.label;
  std::lock_guard lock(mutex_);
  open->recorded = recording_;
  if (recording_) open->times.queued_ns = NanosNow();
  int64_t sent = 0;
  for (const Round& round : operation.rounds) {
    for (const PeerSpan& piece : round.sends) sent += static_cast<int64_t>(piece.bytes);
    for (const PeerSpan& piece : round.receives) open->times.bytes += static_cast<int64_t>(piece.bytes);
  }
  INTERLACE_TRY(mesh_->Start(operation));
  stats_.bytes_sent += sent;
  stats_.bytes_received += open->times.bytes;
  ++stats_.calls;
  open_.emplace(next_ticket_, std::move(open));
  return next_ticket_++;
}

Status Collectives::WaitFor(Ticket ticket, double timeout_s) {
  if (auto failure = mesh_->failure()) return *failure;
  Open* open;
  {
    std::lock_guard lock(mutex_);
    const auto it = open_.find(ticket);
    if (it == open_.end())
      return MakeError("axis ", group().axis, ": no transfer ", ticket, " is under way (waited for twice?)");
    open = it->second.get();
  }
  for (const Copy& copy : open->copies) {
    if (copy.bytes > 0 && copy.from != copy.to) std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
  }
  INTERLACE_TRY(mesh_->Finish(open->operation, timeout_s));
  for (const LocalSum& sum : open->operation.rounds.back().sums) SumInOrder(sum, parallel_);
  std::lock_guard lock(mutex_);
  if (open->recorded) {
    open->times.begin_ns = open->operation.begin_ns;
    open->times.end_ns = open->operation.end_ns;
    times_[ticket] = open->times;
  }
  open_.erase(ticket);
  return Ok{};
}

Collectives::Stats Collectives::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

void Collectives::SetRecording(bool on) {
  std::lock_guard lock(mutex_);
  recording_ = on;
  times_.clear();
}

TransferTimes Collectives::TakeTimes(Ticket ticket) {
  std::lock_guard lock(mutex_);
  const auto it = times_.find(ticket);
  if (it == times_.end()) return {};
  const TransferTimes times = it->second;
  times_.erase(it);
  return times;
}

}  // namespace interlace
