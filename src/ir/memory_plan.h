// memory_plan.h — a place in one arena for everything that comes and goes in a training step: results of ops, what
// phases hand on, receive buffers of reductions, and what kernels take inside (workspaces), when it is known.
//
// The time axis is made of the distinct phases in run order, each with a slot for its beginning, its ops and its end:
//
//   | b op op ... op e | b op op ... op e | b op ... e |          micro_batch.first, micro_batch.middle, update
//
// A storage is alive in one span, or in several when phases hand it on: what a phase gives is what the next takes, in
// the same place. A phase that repeats runs with the same places every time; if it takes one storage and gives another
// for it while the first is still alive (a transfer that is under way across micro-batches), it gets two or more
// variants that take turns. What a run saves for a micro-batch keeps a place of its own until it is loaded, and as many
// places as are in use at once are made for a name (carried_places.h): a phase has a variant for each choice of places
// that it runs with, and for each set of places that others keep beside it. The sources and the receive buffer of a
// transfer live until it is waited for, in whichever phase.
//
// What goes out to the tier (residency.h) lives in the spans of its stays in memory, each from its reload.start to its
// offload.wait. A program that moves storages has lives but no places: its memory comes from a heap of pages
// (tier/page_heap.h). Other persistent storages (states, parameters, buffers, constants) and inputs are not in the
// arena.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ir/arena_pack.h"
#include "ir/program.h"

namespace interlace {

inline constexpr int64_t kArenaPage = 4096;  // bytes: what systems map, and what direct I/O is aligned to
// Pieces of the heap that programs which move storages have instead of the arena (tier/page_heap.h): whole pages
// from this size on; smaller ones come from malloc, which gives an aligned block up to kArenaAlignment more.
inline constexpr int64_t kHeapLeast = 16 * kArenaPage;  // bytes
inline int64_t HeapBytes(int64_t bytes) {
  return bytes < kHeapLeast ? ArenaBytes(bytes) + kArenaAlignment : (bytes + kArenaPage - 1) / kArenaPage * kArenaPage;
}

struct PlannedBlock {
  enum class What : uint8_t { kStorage, kWorkspace, kReceive };
  What what = What::kStorage;
  ValueId root = kNone;  // of a storage: one of its names
  OpId op = kNone;       // of a workspace or receive buffer
  int64_t bytes = 0;     // as asked for; in the arena rounded up to kArenaAlignment
};

// One phase, or one of the copies of a phase that runs with several choices of places.
struct PlanVariant {
  const Phase* phase = nullptr;
  int32_t turn = 0;               // variants of one turn find their storages at the same places, or have none in common
  int32_t same_as = 0;            // the first variant with the same places; they differ in what is saved beside them
  int32_t axis = 0;               // of the slot of its beginning; op i is at axis + 1 + i
  std::vector<int32_t> block_of;  // by value id: block of a root that lives here, or -1
  std::vector<int32_t> workspace;  // by place of the op: block, or -1
  std::vector<int32_t> receive;    // likewise
};

struct MemoryPlan {
  std::vector<PlannedBlock> blocks;
  std::vector<ArenaBlock> lives;  // of each block
  ArenaPacking packing;           // its offsets are empty when something moves
  std::vector<PlanVariant> variants;
  // By entry of Program::RunOrder: the variants that its runs are of, in turns.
  std::vector<std::vector<int32_t>> turns;
  int64_t live_bytes = 0;  // largest sum of live blocks, not rounded up
  // What the runtime takes: the arena's top; when something moves, the live sum in pieces of the heap.
  int64_t taken_bytes = 0;

  // Of run `i` of an entry of Program::RunOrder.
  int32_t VariantOf(size_t entry, int64_t i) const {
    return turns[entry][static_cast<size_t>(i) % turns[entry].size()];
  }
  bool placed() const { return !packing.offsets.empty() || blocks.empty(); }
  int64_t OffsetOf(int32_t block) const { return packing.offsets[block]; }
  // Taken / live - 1, of the sum rounded up to the alignment.
  double Fragmentation() const {
    return packing.live == 0 ? 0 : static_cast<double>(taken_bytes) / static_cast<double>(packing.live) - 1;
  }
};

struct MemoryPlanOptions {
  // workspace[p][i]: bytes that op i of program.phases[p] takes inside. May be shorter.
  std::vector<std::vector<int64_t>> workspace;
  // Transfers are those of our own transport, whose reductions receive into the arena what the other ranks send, each
  // piece at a multiple of kArenaAlignment (CPUs); else those of process groups.
  bool receive_buffers = true;
  // By value id, may be shorter: roots that get no place, because somebody else makes their memory.
  std::vector<bool> left_out;
  bool pack = true;  // false: lives only, no offsets
};

// Bytes that a transfer takes beside its operands and results: what is received to be added up, or to be put together
// piece by piece, and what is packed to be sent. 0 for what comes straight into a result, for other ops and on an axis
// of one rank. Of process groups (not `own`): the row's sums, of which each replica gets a part.
int64_t ReceiveBytes(const Program& program, const Op& op, bool own = true);

// Error: a symbolic size; values handed from phase to phase in a way that no few variants cover.
Result<MemoryPlan> PlanMemory(const Program& program, const MemoryPlanOptions& options = {});

// "u3.exp_avg", "%12 aten.mm".
std::string NameOfStorage(const Program& program, ValueId root);
// The same, or "inside aten.mm", "receive buffer of reduce.start".
std::string NameOfBlock(const Program& program, const PlannedBlock& block);

// The text of `interlace inspect --memory`: what is taken, live sum, fragmentation, what lives at the peak, the largest
// blocks.
std::string DescribeMemoryPlan(const Program& program, const MemoryPlan& plan, int limit = 12);

}  // namespace interlace
