#include "ir/residency.h"

namespace interlace {

std::string_view PlaceName(Place place) {
  constexpr std::string_view kNames[] = {"in memory", "on its way out", "out", "on its way back"};
  return kNames[static_cast<size_t>(place)];
}

const Move* MoveOf(const Op& op) {
  static constexpr Move kMoves[] = {{Place::kIn, Place::kLeaving},
                                    {Place::kLeaving, Place::kOut},
                                    {Place::kOut, Place::kComing},
                                    {Place::kComing, Place::kIn}};
  switch (op.kind) {
    case OpKind::kOffloadStart:
      return &kMoves[0];
    case OpKind::kOffloadWait:
      return &kMoves[1];
    case OpKind::kReloadStart:
      return &kMoves[2];
    case OpKind::kReloadWait:
      return &kMoves[3];
    default:
      return nullptr;
  }
}

bool IsClean(const Op& op) {
  const Arg* clean = op.Attr("clean");
  return clean != nullptr && clean->boolean;
}

bool IsFresh(const Op& op) {
  const Arg* fresh = op.Attr("fresh");
  return fresh != nullptr && fresh->boolean;
}

Residency ComputeResidency(const Program& program) {
  Residency out;
  std::vector<char> moves(program.num_values(), 0);
  std::unordered_map<const Phase*, std::vector<OpId>> moving;
  for (const Phase& phase : program.phases) {
    for (OpId id : phase.ops) {
      const Op& op = program.op(id);
      if (MoveOf(op) == nullptr) continue;
      moving[&phase].push_back(id);
      ForEachOperand(op, [&](ValueId operand) { moves[operand] = 1; });
    }
  }
  std::vector<Place> now;
  std::unordered_map<ValueId, size_t> index;
  for (const State& state : program.states) {
    if (!state.out && !moves[state.value]) continue;
    index[state.value] = out.states.size();
    out.states.push_back(state.value);
    now.push_back(state.out ? Place::kOut : Place::kIn);
  }
  if (out.states.empty()) return out;
  for (const auto& [phase, count] : program.RunOrder()) {
    out.at_begin.emplace(phase, now);
    for (OpId id : moving[phase]) {
      const Op& op = program.op(id);
      ForEachOperand(op, [&](ValueId operand) {
        if (auto found = index.find(operand); found != index.end()) now[found->second] = MoveOf(op)->to;
      });
    }
  }
  return out;
}

}  // namespace interlace
