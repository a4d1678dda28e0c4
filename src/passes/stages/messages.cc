#include "passes/stages/messages.h"

#include <algorithm>
#include <map>
#include <set>

#include "ir/op_table.h"
#include "ir/text.h"

namespace interlace::stages {
namespace {

class Planner {
 public:
  Planner(const Program& program, const Flow& flow, Layout& layout) : program_(program), flow_(flow), layout_(layout) {}

  Status Run(bool split) {
    layout_.turn.assign(static_cast<size_t>(flow_.size()), Turn::kForward);
    for (int32_t i = flow_.first_backward(); i < flow_.size(); ++i) layout_.turn[i] = Turn::kBackward;
    FindHomes();
    for (int32_t i = flow_.first_backward(); i < flow_.size(); ++i) {
      if (flow_.op(i).kind == OpKind::kGrad) ShareGradient(i);
    }
    if (split) SplitBackward();
    for (auto& [grad, parts] : layout_.gradients) {
      for (GradPart& part : parts) {
        for (ValueId id : part.values) {
          const int32_t def = flow_.DefOf(program_.RootOf(id));
          part.place.turn = std::max(part.place.turn, def < 0 ? Turn::kBackward : layout_.turn[def]);
        }
      }
    }
    std::map<ValueId, std::vector<Station>> uses;  // by storage, each place once
    for (int32_t i = 0; i < flow_.size(); ++i) {
      if (layout_.stage[i] < 0) continue;
      const Station place{layout_.stage[i], layout_.turn[i]};
      for (ValueId root : flow_.Needs(i)) {
        std::vector<Station>& places = uses[root];
        if (std::find(places.begin(), places.end(), place) == places.end()) places.push_back(place);
      }
      INTERLACE_TRY(CheckWrites(i));
    }
    for (const auto& [root, places] : uses) INTERLACE_TRY(Send(root, places));
    std::stable_sort(layout_.messages.begin(), layout_.messages.end(), [](const Message& a, const Message& b) {
      return a.after != b.after ? a.after < b.after : a.root < b.root;
    });
    return Ok{};
  }

 private:
  void FindHomes() {
    layout_.trained.assign(static_cast<size_t>(program_.num_values()), 0);
    layout_.home.assign(static_cast<size_t>(program_.num_values()), -1);
    for (const bool forward : {true, false}) {
      for (int32_t i = 0; i < flow_.size(); ++i) {
        if ((i < flow_.first_backward()) != forward || layout_.stage[i] < 0) continue;
        for (ValueId root : flow_.Needs(i)) {
          int32_t& home = layout_.home[root];
          if (program_.value(root).kind != ValueKind::kParam) continue;
          if (home < 0 || (forward && layout_.stage[i] < home)) home = layout_.stage[i];
        }
      }
    }
    for (const Param& param : program_.params) layout_.home[param.value] = std::max(layout_.home[param.value], 0);
  }

  // The values that a gradient is the sum of, one after the other, and the ops that add them up.
  void Addends(ValueId value, std::vector<ValueId>& values, std::vector<int32_t>& sums) const {
    const int32_t def = program_.RootOf(value) == value ? flow_.DefOf(value) : -1;
    if (def < 0 || flow_.SumsFor(def) == kNone) return values.push_back(value);
    sums.push_back(def);
    for (const Arg& arg : flow_.op(def).args) Addends(arg.value, values, sums);
  }

  // The parameter belongs to the first stage that uses it or, where several ranks make parts of its gradient, to these.
  void ShareGradient(int32_t index) {
    const Op& op = flow_.op(index);
    const ValueId param = program_.RootOf(op.args[0].value);
    layout_.trained[param] = 1;
    std::vector<ValueId> values;
    std::vector<int32_t> sums;
    Addends(op.args[1].value, values, sums);
    std::map<int64_t, GradPart> parts;  // by rank
    for (ValueId value : values) {
      const int32_t def = flow_.DefOf(program_.RootOf(value));
      const int32_t stage = def < 0 || layout_.stage[def] < 0 ? layout_.home[param] : layout_.stage[def];
      GradPart& part = parts.try_emplace(layout_.RankOf(stage), GradPart{{stage, Turn::kBackward}, {}}).first->second;
      part.place.stage = std::min(part.place.stage, stage);
      part.values.push_back(value);
    }
    if (parts.size() == 1) {
      layout_.stage[index] = layout_.home[param];  // elsewhere made, it comes by message
      return;
    }
    layout_.stage[index] = -1;
    for (int32_t sum : sums) layout_.stage[sum] = -1;
    layout_.home[param] = parts.begin()->second.place.stage;
    for (auto& [rank, part] : parts) {
      layout_.shared[param].push_back(rank);
      layout_.gradients[index].push_back(std::move(part));
    }
  }

  // By storage: the stages that it must be there for in the backward part, to be read or until it has been sent.
  std::map<ValueId, std::set<int32_t>> StagesWith() const {
    std::map<ValueId, std::set<int32_t>> out;
    for (int32_t i = 0; i < flow_.size(); ++i) {
      if (layout_.stage[i] < 0) continue;
      for (ValueId root : flow_.Needs(i)) {
        const int32_t def = flow_.DefOf(root);
        if (def < 0 || layout_.stage[def] < 0) continue;
        if (i >= flow_.first_backward()) out[root].insert(layout_.stage[i]);
        if (layout_.RankOf(layout_.stage[def]) != layout_.RankOf(layout_.stage[i]))
          out[root].insert(layout_.stage[def]);
      }
    }
    for (const auto& [grad, parts] : layout_.gradients) {
      for (const GradPart& part : parts) {
        for (ValueId id : part.values) out[program_.RootOf(id)].insert(part.place.stage);
      }
    }
    return out;
  }

  // What no other stage needs, directly or through other ops, can wait. But a storage goes from place to place of a
  // rank in one order, and gradients of weights of one stage are made before or behind the backward part of another:
  // what reads a storage that both must have does not wait.
  void SplitBackward() {
    const std::map<ValueId, std::set<int32_t>> stages = StagesWith();
    const auto elsewhere = [&](ValueId root, int32_t stage) {
      const auto found = stages.find(root);
      return found != stages.end() && std::any_of(found->second.begin(), found->second.end(), [&](int32_t other) {
               return other != stage && layout_.RankOf(other) == layout_.RankOf(stage);
             });
    };
    std::vector<char> needed(static_cast<size_t>(program_.num_values()), 0);  // by root
    for (const auto& [grad, parts] : layout_.gradients) {
      for (const GradPart& part : parts) {
        for (ValueId id : part.values) {
          const int32_t def = flow_.DefOf(program_.RootOf(id));
          if (def >= 0 && layout_.stage[def] != part.place.stage) needed[program_.RootOf(id)] = 1;
        }
      }
    }
    for (int32_t i = flow_.size(); i-- > flow_.first_backward();) {
      if (layout_.stage[i] < 0) continue;
      const int32_t stage = layout_.stage[i];
      const Op& op = flow_.op(i);
      bool soon = stage == 0 || op.kind == OpKind::kOutput || op.kind == OpKind::kCallPython;
      for (ValueId id : op.results) soon = soon || (id != kNone && needed[program_.RootOf(id)] != 0);
      for (ValueId id : WrittenOperands(program_, op)) soon = soon || needed[program_.RootOf(id)] != 0;
      // A wait goes with its start, which comes after it here: where it comes soon, the wait does.
      if (IsWait(op)) {
        ForEachOperand(op, [&](ValueId id) {
          const int32_t start = flow_.DefOf(program_.RootOf(id));
          soon = soon || needed[program_.RootOf(id)] != 0;
          if (start < flow_.first_backward()) return;
          for (ValueId root : flow_.Needs(start)) soon = soon || elsewhere(root, stage);
        });
      }
      for (ValueId root : flow_.Needs(i)) soon = soon || elsewhere(root, stage);
      if (!soon) layout_.turn[i] = Turn::kWeights;
      for (ValueId root : flow_.Needs(i)) {
        const int32_t from = flow_.DefOf(root);
        if (from < flow_.first_backward()) continue;
        if (soon || layout_.stage[from] != stage) needed[root] = 1;
      }
    }
  }

  Status CheckWrites(int32_t index) const {
    const Op& op = flow_.op(index);
    for (ValueId id : WrittenOperands(program_, op)) {
      const int32_t from = flow_.DefOf(program_.RootOf(id));
      if (from < 0 || flow_.Repeats(from) || layout_.stage[from] == layout_.stage[index]) continue;
      return Error{"%" + std::to_string(id) + " is made by stage " + std::to_string(layout_.stage[from]) +
                       " and changed by stage " + std::to_string(layout_.stage[index]) + "; choose another border",
                   PrintOp(program_, op)};
    }
    return Ok{};
  }

  Status Send(ValueId root, const std::vector<Station>& uses) {
    const int32_t made = flow_.DefOf(root);
    const ValueKind kind = program_.value(root).kind;
    if (kind == ValueKind::kBuffer) return SendBuffer(root, uses);
    Station from{0, Turn::kForward};
    if (kind == ValueKind::kParam) {
      if (!layout_.trained[root]) return Ok{};  // every rank that uses it has it
      from.stage = layout_.home[root];
    } else if (made >= 0) {
      from = {layout_.stage[made], layout_.turn[made]};
    }
    std::map<int32_t, std::vector<Station>> by_rank;
    const auto shared = layout_.shared.find(root);
    for (const Station& place : uses) {
      const int32_t rank = layout_.RankOf(place.stage);
      if (rank == layout_.RankOf(from.stage)) {
        if (place.stage != from.stage && !IsThere(from, place)) return TooLate(root, from, place);
        continue;
      }
      if (shared != layout_.shared.end() && std::count(shared->second.begin(), shared->second.end(), rank) > 0)
        continue;
      by_rank[rank].push_back(place);
    }
    for (auto& [rank, places] : by_rank) {
      std::sort(places.begin(), places.end(), Before);
      Message message{root, flow_.LastWrite(root), from, places[0]};
      if (from.turn == Turn::kForward) {
        const auto up =
            std::find_if(places.begin(), places.end(), [&](const Station& p) { return p.stage > from.stage; });
        if (up != places.end()) {
          message.to = {up->stage, Turn::kForward};
          for (const Station& p : places) {
            if (p.stage > from.stage) message.to.stage = std::min(message.to.stage, p.stage);
          }
        } else {
          message.from.turn = message.to.turn = Turn::kBackward;
          message.after = -1;
        }
      } else if (message.to.turn == Turn::kWeights) {
        message.to.turn = Turn::kBackward;
      }
      const bool late = message.to.turn == Turn::kBackward && message.to.stage >= message.from.stage;
      if (late || from.turn == Turn::kWeights || Before(places[0], message.to)) return TooLate(root, from, places[0]);
      layout_.messages.push_back(message);
    }
    return Ok{};
  }

  // Whether one stage of a rank has made what another one of it needs, in any order of runs.
  static bool IsThere(const Station& from, const Station& to) {
    if (from.turn == Turn::kForward) return to.turn != Turn::kForward || to.stage > from.stage;
    return from.turn == Turn::kBackward && to.turn != Turn::kForward && to.stage < from.stage;
  }

  Error TooLate(ValueId root, const Station& from, const Station& to) const {
    const int32_t made = flow_.DefOf(root);
    return MakeError("%", root, ", made by ", made >= 0 ? flow_.op(made).name : "the model", " in stage ", from.stage,
                     ", is needed by stage ", to.stage, " before it can be there; choose other borders");
  }

  Status SendBuffer(ValueId root, const std::vector<Station>& uses) const {
    for (const Station& place : uses) {
      if (layout_.RankOf(place.stage) == layout_.RankOf(uses[0].stage)) continue;
      for (const Buffer& buffer : program_.buffers) {
        if (buffer.value != root) continue;
        return MakeError("buffer '", buffer.name, "' is changed by the model and used by stages ", uses[0].stage,
                         " and ", place.stage, ", on two ranks; choose borders that leave it to one");
      }
    }
    return Ok{};
  }

  const Program& program_;
  const Flow& flow_;
  Layout& layout_;
};

// Between two ranks what one stage sends to one other comes in the order it is sent in; the runs of other stages lie
// between in any order. So these have a channel each: that of the sender's chunk, and more where the same stage sends
// to several of a rank.
void FindChannels(Layout& layout) {
  for (const Message& m : layout.messages) {
    if (layout.RankOf(m.from.stage) != layout.RankOf(m.to.stage)) layout.channels[{m.from.stage, m.to.stage}] = 0;
  }
  std::map<std::pair<int32_t, int32_t>, int64_t> next;  // by ranks
  std::set<std::pair<int32_t, int32_t>> taken;          // the stage that sends and the rank that receives
  for (auto& [stages, channel] : layout.channels) {
    const auto [from, to] = stages;
    const int32_t rank = layout.RankOf(to);
    int64_t& more = next.try_emplace({layout.RankOf(from), rank}, layout.deal.chunks).first->second;
    channel = taken.insert({from, rank}).second ? layout.deal.ChunkOf(from) : more++;
  }
}

}  // namespace

bool Before(const Station& a, const Station& b) {
  if (a.turn != b.turn) return a.turn < b.turn;
  return a.turn == Turn::kForward ? a.stage < b.stage : a.stage > b.stage;
}

int64_t Layout::Channels() const {
  int64_t last = 0;
  for (const auto& [stages, channel] : channels) last = std::max(last, channel);
  return last + 1;
}

bool Layout::IsForeign(ValueId root, int32_t rank) const {
  if (trained[root] == 0 || RankOf(home[root]) == rank) return false;
  const auto found = shared.find(root);
  return found == shared.end() || std::find(found->second.begin(), found->second.end(), rank) == found->second.end();
}

std::vector<ValueId> CrossingRoots(const Program& program, const Layout& layout) {
  std::vector<ValueId> roots;
  for (const Message& message : layout.messages) {
    if (program.value(message.root).kind == ValueKind::kResult) roots.push_back(message.root);
  }
  return roots;
}

Result<Layout> MakeLayout(const Program& program, const Flow& flow, std::vector<int32_t> stage, Deal deal, bool split) {
  Layout layout;
  layout.deal = deal;
  layout.stage = std::move(stage);
  INTERLACE_TRY(Planner(program, flow, layout).Run(split));
  FindChannels(layout);
  return layout;
}

}  // namespace interlace::stages
