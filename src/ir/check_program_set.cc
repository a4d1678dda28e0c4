// Whether the stages of a set fit: the messages and collectives along their axis are listed stage by stage in the order
// of the run lines, compared, and then walked together as the ranks would.
#include <algorithm>
#include <map>

#include "base/append.h"
#include "base/scan.h"
#include "ir/op_table.h"
#include "ir/program_set.h"
#include "ir/text.h"
#include "ir/verifier.h"

namespace interlace {
namespace {

constexpr size_t kMostOfStage = size_t{1} << 24;  // of a stage: starts and waits of a step

// A start or a wait along the axis of the stages. Of a message: its number among those of its channel from one stage to
// the other.
struct Event {
  OpId op = kNone;
  int64_t micro_batch = kNone;
  int32_t peer = -1;  // the other stage; -1: a collective of all
  int64_t channel = 0, number = 0;
  bool waits = false, sends = false;
};

// Of a stage or, where their ranks are unlike, of one rank.
class StageEvents {
 public:
  StageEvents(const Program& program, const std::string& axis, int32_t index, size_t count)
      : program_(program), axis_(axis), stage_(index), sent(count), received(count) {}
  // Ops by channel, in order.
  using Channels = std::map<int64_t, std::vector<OpId>>;

  // Error: of an op, to be told with its stage.
  Status Run(OpId& at) {
    for (const Program::StepRun& run : program_.RunsOfStep()) {
      for (int64_t i = 0; i < run.count; ++i) {
        const int64_t micro_batch = run.first == kNone ? kNone : run.first + i * program_.width;
        if (before_ != nullptr) HandOn(*before_, *run.phase);
        for (const Carried& load : run.phase->loads) {
          if (const auto found = saved_.find({load.name, micro_batch}); found != saved_.end())
            in_flight_[load.value] = saved_.extract(found).mapped();
        }
        for (OpId id : run.phase->ops) {
          at = id;
          INTERLACE_TRY(Visit(program_.op(id), micro_batch));
        }
        for (const Carried& save : run.phase->saves) {
          if (const auto found = in_flight_.find(save.value); found != in_flight_.end())
            saved_[{save.name, micro_batch}] = found->second;
        }
        before_ = run.phase;
      }
    }
    return Ok{};
  }

 private:
  bool AlongTheStages(const Op& op) const {
    std::string axes(AxisOf(program_, op));
    if (TraitsOf(op).family == OpFamily::kUnit && !op.units.empty()) axes += "," + program_.units[op.units[0]].replicas;
    return NamesAxis(axes, axis_);
  }

  Status Visit(const Op& op, int64_t micro_batch) {
    if (events.size() > kMostOfStage) return MakeError("a step has more than ", kMostOfStage, " starts and waits");
    if (IsWait(op)) {
      ForEachOperand(op, [&](ValueId id) {
        const auto started = in_flight_.find(id);
        if (started == in_flight_.end()) return;  // along another axis, or of the step before
        Event event = started->second;
        event.op = op.id, event.micro_batch = micro_batch, event.waits = true;
        events.push_back(event);
        in_flight_.erase(started);
      });
      return Ok{};
    }
    if (!IsStart(op) || !AlongTheStages(op)) return Ok{};
    Event event{.op = op.id, .micro_batch = micro_batch};
    if (TraitsOf(op).family == OpFamily::kPeer) {
      const std::string own = "rank_" + axis_;
      INTERLACE_ASSIGN(const int64_t peer, program_.dims.Evaluate(op.Attr("peer")->integer, {{own, stage_}}));
      if (peer == stage_) return MakeError(op.name, " names this stage itself; write peer= with another");
      event.peer = static_cast<int32_t>(peer);
      event.sends = op.kind == OpKind::kSendStart;
      event.channel = ChannelOf(op);
      std::vector<OpId>& list = (event.sends ? sent : received)[static_cast<size_t>(peer)][event.channel];
      event.number = static_cast<int64_t>(list.size());
      list.push_back(op.id);
    } else {
      event.number = static_cast<int64_t>(collectives.size());
      collectives.push_back(op.id);
    }
    events.push_back(event);
    for (ValueId id : op.results) {
      if (id != kNone) in_flight_[id] = event;
    }
    return Ok{};
  }

  void HandOn(const Phase& from, const Phase& to) {
    std::map<ValueId, Event> next;
    for (size_t i = 0; i < from.gives.size() && i < to.takes.size(); ++i) {
      const auto found = in_flight_.find(from.gives[i]);
      if (found != in_flight_.end()) next[to.takes[i]] = found->second;
    }
    in_flight_ = std::move(next);
  }

  const Program& program_;
  const std::string axis_;
  const int32_t stage_;
  const Phase* before_ = nullptr;
  std::map<ValueId, Event> in_flight_;                      // by result of a start
  std::map<std::pair<std::string, int64_t>, Event> saved_;  // by name and micro-batch

 public:
  std::vector<Event> events;
  std::vector<Channels> sent, received;  // by the other stage
  std::vector<OpId> collectives;
};

// "f32[4,8]", whatever the strides.
std::string Sizes(const Program& program, const Type& type) {
  std::string out(DTypeName(type.dtype));
  for (size_t i = 0; i < type.sizes.size(); ++i) out += (i > 0 ? "," : "[") + program.dims.ToString(type.sizes[i]);
  return out + (type.sizes.empty() ? "[]" : "]");
}

class Check {
 public:
  explicit Check(const ProgramSet& set) : set_(set) {
    for (size_t s = 0; s < set.stages.size(); ++s) {
      const std::optional<StageOf>& stage = set.stages[s].program.stage;
      const bool unlike = stage && stage->unlike() && s < stage->ranks.size();
      unlike_ = unlike_ || unlike;
      stage_of_.insert(stage_of_.end(), unlike ? static_cast<size_t>(std::min(stage->ranks[s], kMostRanks)) : 1,
                       static_cast<int32_t>(s));
    }
    count_ = static_cast<int32_t>(stage_of_.size());
  }

  Status Run() {
    INTERLACE_TRY(Programs());
    for (int32_t s = 0; s < count_; ++s) {
      StageEvents& stage = stages_.emplace_back(ProgramOf(s), set_.axis, s, static_cast<size_t>(count_));
      OpId at = kNone;
      if (Status status = stage.Run(at); !status.ok()) return At(s, at, status.error().message);
    }
    for (int32_t from = 0; from < count_; ++from) {
      for (int32_t to = 0; to < count_; ++to) INTERLACE_TRY(Messages(from, to));
    }
    for (int32_t s = 0; s < count_; ++s) INTERLACE_TRY(HasMessages(s));
    for (int32_t s = 1; s < count_; ++s) INTERLACE_TRY(Collectives(s));
    return Walk();
  }

 private:
  // By index along the axis: a stage or, where their ranks are unlike, a rank.
  const Program& ProgramOf(int32_t s) const { return set_.stages[static_cast<size_t>(stage_of_[s])].program; }
  const std::string& FileOf(int32_t s) const { return set_.stages[static_cast<size_t>(stage_of_[s])].file; }
  std::string NameOf(int32_t s) const {
    const std::string rank = unlike_ ? "rank " + std::to_string(s) + ", " : "";
    return rank + "stage " + std::to_string(stage_of_[s]) + " (" + FileOf(s) + ")";
  }

  int32_t LineOf(int32_t s, OpId op) {
    auto [found, fresh] = lines_.try_emplace(s);
    if (fresh) found->second = PrintWithLines(ProgramOf(s)).op_line;
    return found->second[static_cast<size_t>(op)];
  }
  Error At(int32_t s, OpId op, const std::string& what) {
    return Error{what + "\n  " + PrintOp(ProgramOf(s), ProgramOf(s).op(op)),
                 NameOf(s) + ", line " + std::to_string(LineOf(s, op))};
  }

  Status Programs() {
    for (int32_t s = 0; s < count_; ++s) {
      if (s > 0 && stage_of_[s] == stage_of_[s - 1]) continue;
      if (Status valid = Verify(ProgramOf(s)); !valid.ok())
        return Error{valid.error().message, NameOf(s) + ", " + valid.error().where};
      const Program &mine = ProgramOf(s), &first = ProgramOf(0);
      const bool same = std::equal(mine.mesh.begin(), mine.mesh.end(), first.mesh.begin(), first.mesh.end(),
                                   [](const Axis& a, const Axis& b) { return a.name == b.name && a.size == b.size; });
      const bool alike = (mine.stage && mine.stage->unlike()) == unlike_;
      if (!alike || (unlike_ && mine.stage->ranks != first.stage->ranks))
        return Error{"it has another number of ranks for each stage than " + NameOf(0) +
                         "; write the same 'stage' line but for its index",
                     NameOf(s)};
      if (!same && !unlike_)
        return Error{"its mesh is not that of " + NameOf(0) + "; write the same 'mesh' lines", NameOf(s)};
      if (mine.stage && (mine.stage->axis != set_.axis || mine.stage->index != stage_of_[s])) {
        return Error{"its text is that of stage " + std::to_string(mine.stage->index) + " along " + mine.stage->axis +
                         "; name it there, or write 'stage " + set_.axis + " " + std::to_string(s) + "'",
                     NameOf(s)};
      }
      if (mine.accumulation != first.accumulation || mine.width != first.width) {
        return Error{Joined("it runs ", mine.accumulation, " micro-batches a step, ", NameOf(0), " runs ",
                            first.accumulation, "; write 'step ", first.accumulation, "'"),
                     NameOf(s)};
      }
    }
    const auto axis = std::find_if(ProgramOf(0).mesh.begin(), ProgramOf(0).mesh.end(),
                                   [&](const Axis& a) { return a.name == set_.axis; });
    if (axis == ProgramOf(0).mesh.end()) {
      return Error{"the mesh has no axis " + InQuotes(set_.axis) + "; add 'mesh " + set_.axis + " " +
                       std::to_string(count_) + "' to every stage",
                   NameOf(0)};
    }
    if (unlike_ && set_.stages.size() != ProgramOf(0).stage->ranks.size())
      return MakeError("the programs are of ", ProgramOf(0).stage->ranks.size(), " stages, but the set has ",
                       set_.stages.size());
    if (axis->size != count_) {
      return MakeError("axis ", set_.axis, " has ", axis->size, " ranks, but the set has ", count_,
                       count_ == 1 ? " stage" : " stages",
                       axis->size > count_
                           ? "; add a line 'stage " + std::to_string(count_) + " \"FILE\" digest \"...\"'"
                           : "; write 'mesh " + set_.axis + " " + std::to_string(count_) + "' in every stage");
    }
    return Ok{};
  }

  // What `from` sends to `to` is what `to` receives from it, in the order of each channel.
  Status Messages(int32_t from, int32_t to) {
    StageEvents::Channels& sent = stages_[static_cast<size_t>(from)].sent[static_cast<size_t>(to)];
    StageEvents::Channels& received = stages_[static_cast<size_t>(to)].received[static_cast<size_t>(from)];
    for (const auto& [channel, list] : sent) received[channel];
    for (const auto& [channel, list] : received) INTERLACE_TRY(Messages(from, to, sent[channel], list));
    return Ok{};
  }
  Status Messages(int32_t from, int32_t to, const std::vector<OpId>& sent, const std::vector<OpId>& received) {
    for (size_t k = 0; k < std::max(sent.size(), received.size()); ++k) {
      const std::string count = Joined(sent.size(), " sent and ", received.size(), " received");
      if (k >= received.size()) {
        return At(from, sent[k],
                  "message " + std::to_string(k + 1) + " to " + NameOf(to) + " is not received there (" + count +
                      "); add %N: " + Sent(from, sent[k]) + " = recv.start() {axis=" + set_.axis +
                      " peer=" + std::to_string(from) + "} and its wait, or drop this send");
      }
      if (k >= sent.size()) {
        return At(to, received[k],
                  "message " + std::to_string(k + 1) + " from " + NameOf(from) + " is not sent there (" + count +
                      "); add a send.start of " + Received(to, received[k]) + " {axis=" + set_.axis +
                      " peer=" + std::to_string(to) + "}, or drop this receive");
      }
      if (const std::string a = Sent(from, sent[k]), b = Received(to, received[k]); a != b) {
        return At(to, received[k],
                  "message " + std::to_string(k + 1) + " from " + NameOf(from) + " is " + a + " (line " +
                      std::to_string(LineOf(from, sent[k])) + " there), not " + b + "; receive " + a);
      }
    }
    return Ok{};
  }
  std::string Sent(int32_t s, OpId op) const {
    return Sizes(ProgramOf(s), ProgramOf(s).value(ProgramOf(s).op(op).args[0].value).type) + NameOfMessage(s, op);
  }
  std::string Received(int32_t s, OpId op) const {
    return Sizes(ProgramOf(s), ProgramOf(s).value(ProgramOf(s).op(op).results[0]).type) + NameOfMessage(s, op);
  }
  // Messages that are called something are the same message at both ends.
  std::string NameOfMessage(int32_t s, OpId op) const {
    const Arg* name = ProgramOf(s).op(op).Attr("message");
    return name == nullptr ? "" : " " + InQuotes(name->text);
  }

  // The ranks along the axis connect before the first step, and a stage that sends nothing would not know of it.
  Status HasMessages(int32_t s) const {
    const StageEvents& stage = stages_[static_cast<size_t>(s)];
    const auto none = [](const std::vector<StageEvents::Channels>& lists) {
      return std::all_of(lists.begin(), lists.end(), [](const StageEvents::Channels& list) { return list.empty(); });
    };
    if (count_ == 1 || !none(stage.sent) || !none(stage.received)) return Ok{};
    return Error{"it neither sends to another stage nor receives from one; drop it from the set and from the mesh",
                 NameOf(s)};
  }

  // All stages meet in the same ones.
  Status Collectives(int32_t s) {
    const std::vector<OpId>&first = stages_[0].collectives, &mine = stages_[static_cast<size_t>(s)].collectives;
    for (size_t k = 0; k < std::max(first.size(), mine.size()); ++k) {
      const bool lacks = k >= mine.size();
      const int32_t at = lacks ? 0 : s, other = lacks ? s : 0;
      const OpId op = lacks ? first[k] : mine[k];
      if (lacks || k >= first.size()) {
        return At(at, op,
                  "the ranks of " + NameOf(other) + " do not join this collective along " + set_.axis +
                      "; every stage needs it");
      }
      const Op &a = ProgramOf(0).op(first[k]), &b = ProgramOf(s).op(mine[k]);
      std::string there = a.name, here = b.name;
      for (ValueId id : a.results) there += " " + Sizes(ProgramOf(0), ProgramOf(0).value(id).type);
      for (ValueId id : b.results) here += " " + Sizes(ProgramOf(s), ProgramOf(s).value(id).type);
      if (there == here) continue;
      return At(s, mine[k],
                "its ranks meet those of " + NameOf(0) + " in another collective, " + there + " at line " +
                    std::to_string(LineOf(0, first[k])) + " there");
    }
    return Ok{};
  }

  // Each stage goes on until it waits for what nobody has started.
  Status Walk() {
    const auto stages = static_cast<size_t>(count_);
    std::vector<size_t> place(stages, 0);
    // Started so far: messages by sender, receiver and channel, of each end; collectives by stage.
    std::vector<std::vector<std::map<int64_t, int64_t>>> sent(stages), received;
    for (auto& of : sent) of.resize(stages);
    received = sent;
    std::vector<int64_t> joined(stages, 0);
    // Whom the event waits for; -1: nobody.
    const auto blocked_by = [&](size_t s, const Event& event) -> int32_t {
      if (!event.waits) return -1;
      if (event.peer < 0) {
        for (size_t other = 0; other < stages; ++other) {
          if (joined[other] <= event.number) return static_cast<int32_t>(other);
        }
        return -1;
      }
      const auto peer = static_cast<size_t>(event.peer);
      auto& ends = event.sends ? received[s][peer] : sent[peer][s];
      const int64_t started = ends[event.channel];
      return started <= event.number ? event.peer : -1;
    };
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t s = 0; s < stages; ++s) {
        const std::vector<Event>& events = stages_[s].events;
        for (; place[s] < events.size() && blocked_by(s, events[place[s]]) < 0; ++place[s], moved = true) {
          const Event& event = events[place[s]];
          if (event.waits) continue;
          if (event.peer < 0) {
            ++joined[s];
          } else {
            const auto peer = static_cast<size_t>(event.peer);
            ++(event.sends ? sent[s][peer] : received[peer][s])[event.channel];
          }
        }
      }
    }
    for (size_t s = 0; s < stages; ++s) {
      if (place[s] == stages_[s].events.size()) continue;
      // Whoever waits, waits for one that waits: follow them to the first that comes again.
      std::vector<bool> seen(stages, false);
      size_t at = s;
      const auto event_of = [&](size_t stage) -> const Event& { return stages_[stage].events[place[stage]]; };
      for (; !seen[at]; at = static_cast<size_t>(blocked_by(at, event_of(at)))) seen[at] = true;
      std::string what =
          "the stages wait for one another, and none goes on; let one of them send before it waits, or wait for what "
          "it sent later:";
      size_t next = at;
      do {
        const Event& event = event_of(next);
        const auto stage = static_cast<int32_t>(next), other = blocked_by(next, event);
        what += Joined("\n  ", NameOf(stage), ", line ", std::to_string(LineOf(stage, event.op)),
                       event.micro_batch == kNone ? "" : ", micro-batch " + std::to_string(event.micro_batch),
                       ", waits for stage ", other, ": ", PrintOp(ProgramOf(stage), ProgramOf(stage).op(event.op)));
        next = static_cast<size_t>(other);
      } while (next != at);
      return Error{what, ""};
    }
    return Ok{};
  }

  static constexpr int64_t kMostRanks = 1 << 16;
  const ProgramSet& set_;
  bool unlike_ = false;  // their ranks
  std::vector<int32_t> stage_of_;
  int32_t count_ = 0;
  std::vector<StageEvents> stages_;
  std::map<int32_t, std::vector<int32_t>> lines_;  // by stage: of each op
};

}  // namespace

Status CheckProgramSet(const ProgramSet& set) {
  return Check(set).Run();
}

}  // namespace interlace
