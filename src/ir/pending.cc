#include "ir/pending.h"

namespace interlace {

bool IsPending(const Op& op) {
  if (op.part != Part::kUpdate) return false;
  const Arg* pending = op.Attr("pending");
  return pending != nullptr && pending->kind == Arg::Kind::kBool && pending->boolean;
}

std::vector<OpId> PendingOps(const Program& program) {
  std::vector<OpId> out;
  const auto order = program.RunOrder();
  if (order.empty()) return out;
  for (OpId id : order[0].first->ops) {
    if (IsPending(program.op(id))) out.push_back(id);
  }
  return out;
}

}  // namespace interlace
