#include "ir/liveness.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "ir/testing/random_program.h"
#include "ir/text.h"

namespace interlace {
namespace {

// Counts by asking, for every op and every storage, whether any value of it is touched before and again at or after.
void CompareWithCounting(const Program& program, const Phase& phase) {
  Result<PhaseLiveness> got = ComputeLiveness(program, phase);
  ASSERT_TRUE(got.ok()) << got.error().ToString();
  auto count = static_cast<int32_t>(phase.ops.size());
  auto touches = [&](int32_t op_index, ValueId root) {
    bool any = false;
    const Op& op = program.op(phase.ops[op_index]);
    ForEachOperand(op, [&](ValueId id) { any |= program.RootOf(id) == root; });
    for (ValueId id : op.writes) any |= program.RootOf(id) == root;
    for (ValueId id : op.results) any |= id != kNone && program.RootOf(id) == root;
    return any;
  };
  std::vector<int64_t> live(count + 1, 0), made(count + 1, 0);
  size_t storages = 0;
  for (ValueId id = 0; id < program.num_values(); ++id) {
    if (!program.HasValue(id) || program.RootOf(id) != id || program.value(id).kind != ValueKind::kResult) continue;
    int32_t first = -1, last = -1;
    for (int32_t i = 0; i < count; ++i) {
      if (!touches(i, id)) continue;
      if (first < 0) first = i;
      last = i;
    }
    if (first < 0) continue;
    ++storages;
    int64_t bytes = *program.StorageBytes(program.value(id).type);
    made[first] += bytes;
    for (int32_t i = first + 1; i <= last; ++i) live[i] += bytes;
    const auto& dead = got->dies_after[last];
    EXPECT_EQ(std::count(dead.begin(), dead.end(), id), 1) << "%" << id;
  }
  EXPECT_EQ(got->storages.size(), storages);
  EXPECT_EQ(got->live_before, live);
  int64_t peak = 0;
  for (int32_t i = 0; i <= count; ++i) peak = std::max(peak, live[i] + made[i]);
  EXPECT_EQ(got->peak_bytes, peak);
}

TEST(Liveness, EqualsCounting) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(seed);
    Program program = testing::RandomProgram({.seed = seed, .layers = static_cast<int>(seed % 10)});
    CompareWithCounting(program, program.phases[0]);
  }
}

constexpr char kTransfers[] = R"(interlace 1 sharded
mesh dp 2
step 1 reduce_each
unit u0 dp f32 numel 64 shard 32
param %0: f32[50] "w" trainable unit u0+0
buffer %1: f32[10] "b" persistent
const %2: f64[1] "c" = [1.0]
state %3: f32[32] u0.shard persistent
state %4: f32[32] u0.grad step
phase micro_batch takes (%5: f32[4]) gives (%15) {
  %10: f32[64] = gather.start(%3) {units=[u0]}
  %11: f32[4] = aten.exp(%5)
  gather.wait(%10)
  %12: f32[50] in %10+0 = view(%10)
  %13: f32[50] = aten.exp(%12)
  release(%10)
  %14: f32[64] = grad.begin() {units=[u0]}
  %16: f32[50] into %14+0 = aten.neg(%13)
  %17: f32[32] into %4+0 = reduce.start(%14) {units=[u0]}
  %15: f32[4] = aten.neg(%11)
  %18: f32[2] = aten.unused(%11)
  reduce.wait(%17)
}
)";

TEST(Liveness, TransfersTakesAndGives) {
  Result<Program> program = Parse(kTransfers);
  ASSERT_TRUE(program.ok()) << program.error().ToString();
  Result<PhaseLiveness> live = ComputeLiveness(*program, program->phases[0]);
  ASSERT_TRUE(live.ok());
  std::string text;
  for (const StorageLife& life : live->storages) {
    text += "%" + std::to_string(life.root) + " " + std::to_string(life.bytes) + " bytes " +
            std::to_string(life.first) + ".." + std::to_string(life.last) + "\n";
  }
  // The flat gradient %14 lives until the reduction that reads it is waited for; what is given lives to the end (12).
  EXPECT_EQ(text,
            "%5 16 bytes -1..1\n%10 256 bytes 0..5\n%11 16 bytes 1..10\n%13 200 bytes 4..7\n%14 256 bytes 6..11\n"
            "%15 16 bytes 9..12\n%18 8 bytes 10..10\n");
  EXPECT_EQ(live->persistent_bytes, 40 + 8 + 128 + 128);  // the sharded parameter owns nothing
  EXPECT_EQ(live->live_before, (std::vector<int64_t>{16, 272, 272, 272, 272, 472, 216, 472, 272, 272, 288, 272, 16}));
  EXPECT_EQ(live->dies_after[1], (std::vector<ValueId>{5}));
  EXPECT_EQ(live->dies_after[11], (std::vector<ValueId>{14}));
  EXPECT_EQ(live->peak_bytes, 472);
}

TEST(Liveness, SymbolicSizesAreAnError) {
  Result<Program> program = Parse(
      "interlace 1 captured\nsymbol b 1 9\nstep 1 reduce_each\ninput %0: f32[b] \"x\"\nphase micro_batch takes () "
      "gives () {\n"
      "  %1: f32[b] = aten.exp(%0)\n}\n");
  ASSERT_TRUE(program.ok());
  EXPECT_EQ(ComputeLiveness(*program, program->phases[0]).error().ToString(),
            "%1: f32[b] = aten.exp(%0): the size b is not a number yet; bind its symbols first");
}

}  // namespace
}  // namespace interlace
