#include "sim/receive_buffers.h"

#include <algorithm>
#include <map>
#include <vector>

#include "ir/op_table.h"

namespace interlace {
namespace {

// One reduction's buffer: the pieces of all peers, each beginning at 64 bytes.
int64_t BytesOf(const Program& program, const Op& op, int64_t ranks) {
  int64_t sum = 0;
  auto add = [&](ValueId id) {
    if (id == kNone) return;
    Result<int64_t> bytes = program.StorageBytes(program.value(id).type);
    if (bytes.ok() && *bytes < (int64_t{1} << 40)) sum += (*bytes + 63) / 64 * 64 * (ranks - 1);
  };
  for (ValueId id : op.results) add(id);
  return sum;
}

struct Pool {
  std::vector<int64_t> free;
  int64_t bytes = 0;

  int64_t Take(int64_t wanted) {
    auto best = free.end();
    for (auto it = free.begin(); it != free.end(); ++it) {
      if (*it >= wanted && (best == free.end() || *it < *best)) best = it;
    }
    if (best == free.end()) {
      if (auto largest = std::max_element(free.begin(), free.end()); largest != free.end()) {
        bytes -= *largest;
        free.erase(largest);
      }
      bytes += wanted;
      return wanted;
    }
    int64_t size = *best;
    free.erase(best);
    return size;
  }
};

}  // namespace

int64_t ReceiveBufferBytes(const Lowered& lowered) {
  const Program& program = *lowered.program;
  Pool pool;
  std::map<ValueId, int64_t> in_use;  // first result of a reduction under way → its buffer
  for (size_t run = 0; run < lowered.run.size(); ++run) {
    int32_t p = lowered.run[run];
    // Phases that repeat take what the run before gave back.
    if (run > 1 && p == lowered.run[run - 1] && p == lowered.run[run - 2]) continue;
    for (const LoweredOp& lop : lowered.ops[p]) {
      const Op& op = program.op(lop.op);
      if (lop.kind == LoweredOp::Kind::kStart && (op.name == "reduce.start" || op.name == "all_reduce.start")) {
        int64_t ranks = lowered.costs[lop.cost].group_ranks;
        if (ranks > 1 && !op.results.empty()) in_use[op.results[0]] = pool.Take(BytesOf(program, op, ranks));
      } else if (lop.kind == LoweredOp::Kind::kWait) {
        ForEachOperand(op, [&](ValueId id) {
          auto found = in_use.find(id);
          if (found == in_use.end()) return;
          pool.free.push_back(found->second);
          in_use.erase(found);
        });
      }
    }
    if (run + 1 == lowered.run.size()) break;
    const Phase &ended = *lowered.phases[p], &next = *lowered.phases[lowered.run[run + 1]];
    std::map<ValueId, int64_t> taken;
    for (size_t i = 0; i < next.takes.size() && i < ended.gives.size(); ++i) {
      auto found = in_use.find(ended.gives[i]);
      if (found != in_use.end()) taken[next.takes[i]] = found->second;
    }
    in_use = std::move(taken);
  }
  return pool.bytes;
}

}  // namespace interlace
