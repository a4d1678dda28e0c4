#include "ir/memory_plan.h"

#include <gtest/gtest.h>

#include <random>

#include "ir/liveness.h"
#include "ir/testing/arena_replay.h"
#include "ir/testing/random_program.h"
#include "ir/text.h"

namespace interlace {
namespace {

Program Parsed(const std::string& text) {
  Result<Program> program = Parse(text);
  EXPECT_TRUE(program.ok()) << ErrorOf(program);
  return std::move(*program);
}

// Blocks of 64 to 6400 bytes; some with two spans.
std::vector<ArenaBlock> RandomBlocks(uint64_t seed, int count) {
  std::mt19937_64 random(seed);
  std::vector<ArenaBlock> blocks(count);
  for (ArenaBlock& b : blocks) {
    b.bytes = 64 * static_cast<int64_t>(1 + random() % 100);
    const auto first = static_cast<int32_t>(random() % 400), length = static_cast<int32_t>(random() % 60);
    b.spans.push_back({first, first + length});
    if (random() % 5 == 0) b.spans.push_back({first + length + 3, first + length + 40});
  }
  return blocks;
}

TEST(ArenaPack, NoTwoLiveBlocksOverlapAndLittleIsLost) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    const std::vector<ArenaBlock> blocks = RandomBlocks(seed, 300);
    const ArenaPacking packing = PackArena(blocks);
    EXPECT_EQ(ErrorOf(CheckPacking(blocks, packing.offsets, packing.top)), "no error") << seed;
    EXPECT_GE(packing.top, packing.live);
    EXPECT_LE(packing.top, packing.live + packing.live / 10) << seed;
    EXPECT_EQ(PackArena(blocks).offsets, packing.offsets);
  }
}

// Saved by the forward part, used backwards: the live sum is reached to the byte.
TEST(ArenaPack, NestedLivesLoseNothing) {
  std::vector<ArenaBlock> blocks;
  for (int32_t i = 0; i < 100; ++i) {
    blocks.push_back({64 * (1 + i * 37 % 50), {{i, 200 - i}}});
    blocks.push_back({64 * (1 + i * 17 % 90), {{i, i + 1}}});
    blocks.push_back({64 * (1 + i * 29 % 90), {{200 - i, 201 - i}}});
  }
  const ArenaPacking packing = PackArena(blocks);
  EXPECT_EQ(ErrorOf(CheckPacking(blocks, packing.offsets, packing.top)), "no error");
  EXPECT_LE(packing.top, packing.live + packing.live / 100);
}

TEST(ArenaPack, TheRefereeSeesEveryFault) {
  const std::vector<ArenaBlock> blocks = {{128, {{0, 5}}}, {64, {{5, 9}, {20, 21}}}, {64, {{6, 8}}}};
  const auto error = [&](std::vector<int64_t> offsets, int64_t top) {
    return ErrorOf(CheckPacking(blocks, offsets, top));
  };
  EXPECT_EQ(error({0, 128, 0}, 192), "no error");
  EXPECT_EQ(error({0, 64, 0}, 192), "blocks 0 and 1 overlap at time 5");
  EXPECT_EQ(error({64, 64, 0}, 192), "blocks 0 and 1 overlap at time 5");
  EXPECT_EQ(error({0, 128, 128}, 192), "blocks 1 and 2 overlap at time 6");
  EXPECT_EQ(error({0, 128, 0}, 128), "block 1 ends above the top of the arena, 128");
  EXPECT_EQ(error({0, 130, 0}, 256), "block 1 at 130 is not aligned to 64 bytes");
  EXPECT_EQ(error({0, 128}, 256), "there are 3 blocks and 2 offsets");
}

TEST(MemoryPlan, PeakIsTheLiveSumOfLiveness) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    const Program program = testing::RandomProgram({.seed = seed, .layers = 10});
    const Result<MemoryPlan> plan = PlanMemory(program);
    ASSERT_TRUE(plan.ok()) << ErrorOf(plan);
    const Result<PhaseLiveness> live = ComputeLiveness(program, program.phases[0]);
    EXPECT_EQ(plan->live_bytes, live->peak_bytes);
    EXPECT_EQ(ErrorOf(testing::ReplayPlan(program, *plan)), "no error");
    for (const StorageLife& s : live->storages) {
      EXPECT_EQ(s.bytes > 0, plan->variants[0].block_of[s.root] >= 0);
    }
  }
}

// A reduction that the next phase waits for: its source stays, and so does what the other ranks send.
const char kAcross[] = R"(interlace 1 sharded
mesh dp 2
step 4 reduce_each
group 0 sgd
unit u0 dp f32 numel 64 shard 32
state %0: f32[32] u0.shard persistent
param %1: f32[64] "w" trainable group 0 unit u0+0
input %2: f32[64] "x"
phase micro_batch takes (%3: f32[32]) gives (%8) {
  %4: f32[64] = aten.mul.Tensor(%2, 2.0) {fwd}
  %7: f32[64] = aten.mul.Tensor(%4, 3.0) {bwd}
  %8: f32[32] = reduce.start(%7) {bwd units=[u0]}
  reduce.wait(%3) {bwd}
  %9: f32[64] = aten.mul.Tensor(%4, 4.0) {bwd}
  %10: f32[64] = aten.mul.Tensor(%9, 4.0) {bwd}
}
phase update once takes (%20: f32[32]) gives (%23) {
  reduce.wait(%20) {upd}
  %21: f32[64] = aten.mul.Tensor(%1, 4.0) {upd}
  %22: f32[64] = aten.mul.Tensor(%21, 4.0) {upd}
  %23: f32[32] = reduce.start(%22) {upd units=[u0]}
}
)";

// Pieces of 192 bytes from the two other ranks along tp, to be added up; all three where they are put together.
TEST(MemoryPlan, ReceiveBuffersOfActivations) {
  const auto received = [](const std::string& op) {
    const Program program = Parsed(
        "interlace 1 scheduled\nmesh dp 2\nmesh tp 3\nstep 1 reduce_each\ninput %0: f32[1,12,12] \"x\"\n"
        "phase micro_batch takes () gives () {\n  %1: " +
        op + "\n}\n");
    return ReceiveBytes(program, program.op(0));
  };
  EXPECT_EQ(received("f32[1,36,12] = all_gather.start(%0) {axis=tp dim=1}"), 0) << "side by side in memory";
  EXPECT_EQ(received("f32[1,12,36] = all_gather.start(%0) {axis=tp dim=2}"), 3 * 576);
  EXPECT_EQ(received("f32[1,12,4] = reduce_scatter.start(%0) {axis=tp dim=2}"), 2 * 192 + 576) << "packed to be sent";
  EXPECT_EQ(received("f32[1,4,12] = reduce_scatter.start(%0) {axis=tp dim=1}"), 2 * 192);
  EXPECT_EQ(received("f32[1,12,12] = all_reduce.start(%0) {axis=dp}"), 576);
  EXPECT_EQ(received("f32[1,36,4] = all_to_all.start(%0) {axis=tp dim=2 to=1}"), 576);
  EXPECT_EQ(received("f32[1,4,36] = all_to_all.start(%0) {axis=tp dim=1 to=2}"), 576);
  EXPECT_EQ(received("f32[1,12,12] = broadcast.start(%0) {axis=tp root=0}"), 0);
  EXPECT_EQ(received("b8[0] = send.start(%0) {axis=tp peer=1}"), 0);
  EXPECT_EQ(received("f32[1,12,12] = recv.start() {axis=tp peer=1}"), 0);
}

TEST(MemoryPlan, TransfersAcrossPhasesKeepTheirSourcesAndTakeTurns) {
  const Program program = Parsed(kAcross);
  const Result<MemoryPlan> plan = PlanMemory(program);
  ASSERT_TRUE(plan.ok()) << ErrorOf(plan);
  // Every micro-batch starts its reduction before it waits for that of the one before: two turns.
  ASSERT_EQ(plan->turns, (std::vector<std::vector<int32_t>>{{0, 1}, {2}}));
  const PlanVariant &even = plan->variants[0], &odd = plan->variants[1], &update = plan->variants[2];
  EXPECT_EQ(even.block_of[8], odd.block_of[3]);
  EXPECT_EQ(odd.block_of[8], even.block_of[3]);
  EXPECT_EQ(odd.block_of[8], update.block_of[20]);
  EXPECT_EQ(update.block_of[23], even.block_of[3]);
  EXPECT_NE(even.block_of[3], even.block_of[8]);
  // The flat gradient of the even one stays until the wait in the odd one, op 3.
  const std::vector<LifeSpan>& flat = plan->lives[even.block_of[7]].spans;
  ASSERT_EQ(flat.size(), 2u);
  EXPECT_EQ(flat[1].first, odd.axis);
  EXPECT_EQ(flat[1].last, odd.axis + 1 + 3);
  // And so does the receive buffer: one other rank, 32 floats.
  ASSERT_GE(even.receive[2], 0);
  EXPECT_EQ(plan->blocks[even.receive[2]].bytes, 128);
  EXPECT_EQ(plan->lives[even.receive[2]].spans[1].last, odd.axis + 1 + 3);
}

// %6 is in memory between steps and out while the micro-batch needs room; %7 is in memory only for its update; %11 goes
// out between its uses.
const char kMoves[] = R"(interlace 1 sharded
mesh dp 1
group 0 adamw
unit u0 dp f32 numel 64 shard 64
state %0: f32[64] u0.full persistent
param %1: f32[64] in %0+0 "w" trainable group 0 unit u0+0
input %2: f32[64] "x"
state %6: f32[64] u0.exp_avg persistent
state %7: f32[64] u0.exp_avg_sq persistent out
phase micro_batch takes () gives (%13) {
  offload.start(%6) {fwd}
  %11: f32[64] = aten.mul.Tensor(%2, 2.0) {fwd}
  offload.start(%11) {fwd}
  offload.wait(%6) {fwd}
  offload.wait(%11) {fwd}
  %12: f32[128] = aten.cat([%2, %1]) {fwd}
  release(%12) {fwd}
  reload.start(%11, %6) {bwd}
  reload.wait(%11, %6) {bwd}
  %13: f32[64] = aten.mul.Tensor(%11, 2.0) {bwd}
}
phase update once takes (%20: f32[64]) gives () {
  reload.start(%7) {upd}
  reload.wait(%7) {upd}
  update.adamw(%0, %20, %6, %7) {upd units=[u0] scale=1.0 ranges=[0,64,0]}
  offload.start(%7) {upd}
  offload.wait(%7) {upd}
}
)";

TEST(MemoryPlan, WhatMovesLivesInItsStaysAndHasNoPlace) {
  const Program program = Parsed(kMoves);
  const Result<MemoryPlan> plan = PlanMemory(program);
  ASSERT_TRUE(plan.ok()) << ErrorOf(plan);
  EXPECT_FALSE(plan->placed());
  const PlanVariant &batch = plan->variants[0], &update = plan->variants[1];
  const auto spans = [&](ValueId root) {
    std::vector<std::pair<int32_t, int32_t>> out;
    for (size_t b = 0; b < plan->blocks.size(); ++b) {
      if (plan->blocks[b].root != root) continue;
      for (const LifeSpan& s : plan->lives[b].spans) out.emplace_back(s.first, s.last);
    }
    return out;
  };
  const auto at = [](const PlanVariant& v, int32_t op) { return v.axis + 1 + op; };
  // What comes back in the micro-batch goes on through the update, and is what the next step begins with.
  EXPECT_EQ(spans(6), (std::vector<std::pair<int32_t, int32_t>>{
                          {0, at(batch, 3)}, {at(batch, 7), at(batch, 10)}, {at(update, -1), at(update, 5)}}));
  EXPECT_EQ(spans(7), (std::vector<std::pair<int32_t, int32_t>>{{at(update, 0), at(update, 4)}}));
  EXPECT_EQ(spans(11),
            (std::vector<std::pair<int32_t, int32_t>>{{at(batch, 1), at(batch, 4)}, {at(batch, 7), at(batch, 9)}}));
  EXPECT_TRUE(spans(0).empty()) << "what never moves is persistent";
  // At the cat nothing else is in memory; the peak is in the update: gradient and both states, each a piece of the
  // heap.
  EXPECT_EQ(plan->live_bytes, 3 * 256);
  EXPECT_EQ(plan->taken_bytes, 3 * HeapBytes(256));
  EXPECT_NE(DescribeMemoryPlan(program, *plan).find("heap           "), std::string::npos);
}

TEST(MemoryPlan, TheReplaySeesWhatIsWrong) {
  const Program program = Parsed(kAcross);
  Result<MemoryPlan> plan = PlanMemory(program);
  ASSERT_TRUE(plan.ok()) << ErrorOf(plan);
  EXPECT_EQ(ErrorOf(testing::ReplayPlan(program, *plan)), "no error");
  // What %4 is made into %7 lies in while it is read.
  const PlanVariant& even = plan->variants[0];
  plan->packing.offsets[even.block_of[9]] = plan->OffsetOf(even.block_of[7]);
  EXPECT_NE(ErrorOf(testing::ReplayPlan(program, *plan)).find("sources or receive buffers of a transfer at "),
            std::string::npos);
}

TEST(MemoryPlan, WorkspacesTakeRoomWhileTheirOpRuns) {
  const Program program = Parsed(kAcross);
  MemoryPlanOptions options;
  options.workspace = {{0, 0, 0, 0, 1000, 0}};
  const Result<MemoryPlan> plan = PlanMemory(program, options);
  ASSERT_TRUE(plan.ok()) << ErrorOf(plan);
  const int32_t block = plan->variants[0].workspace[4];
  ASSERT_GE(block, 0);
  EXPECT_EQ(plan->lives[block].bytes, 1024);
  EXPECT_EQ(plan->lives[block].spans[0].first, plan->lives[block].spans[0].last);
  const std::string text = DescribeMemoryPlan(program, *plan);
  EXPECT_NE(text.find("inside aten.mul.Tensor"), std::string::npos) << text;
  EXPECT_NE(text.find("peak           in micro_batch at %9: f32[64] = aten.mul.Tensor(%4, 4.0)"), std::string::npos)
      << text;
}

TEST(MemoryPlan, WhatIsLeftOutHasNoPlace) {
  const Program program = Parsed(kAcross);
  const Result<MemoryPlan> whole = PlanMemory(program);
  ASSERT_TRUE(whole.ok()) << ErrorOf(whole);
  MemoryPlanOptions options;
  options.left_out.resize(8);
  options.left_out[7] = true;
  const Result<MemoryPlan> plan = PlanMemory(program, options);
  ASSERT_TRUE(plan.ok()) << ErrorOf(plan);
  EXPECT_GE(whole->variants[0].block_of[7], 0);
  for (const PlanVariant& variant : plan->variants) EXPECT_EQ(variant.block_of[7], -1);
  EXPECT_LT(plan->blocks.size(), whole->blocks.size());
}

}  // namespace
}  // namespace interlace
