#include "ir/text.h"

#include <gtest/gtest.h>

namespace interlace {
namespace {

constexpr char kTwoLayer[] = R"(interlace 1 sharded
meta model "two-layer"
mesh dp 2
symbol b 2 4096
step 1 reduce_each
group 0 adamw
module 0 "" "TwoLayer"
module 1 "fc1" "Linear"
source 0 "two_layer.py:12"
unit u0 dp f32 numel 1024 shard 512
param %0: f32[32,32] "fc1.weight" trainable group 0 unit u0+0 alias "fc2.weight"
buffer %1: f32[64] "bn.running_mean" persistent
input %2: f32[b,32] "x"
const %3: f32[] "c0" = [1.0]
state %4: f32[512] u0.shard persistent
state %5: f32[512] u0.grad step
phase micro_batch takes () gives () {
  %6: f32[1024] = gather.start(%4) {fwd lane=gather units=[u0]}
  gather.wait(%6) {fwd lane=gather}
  %7: f32[32,32] in %6+0 = view(%6) {fwd m1}
  %8: f32[32,32]{1,32} in %6+0 = view(%6) {fwd m1 s0}
  %9: f32[b,32] = aten.mm(%2, %8) {fwd m1 s0}
  %10: f32[b,b//2+b], _ = aten.odd(%9, 2*b, [1, -1.5, none, [true]], 1e+20, dtype=f32, s="a\"b\n") {fwd rng=3 writes=[%1] x=inf}
  release(%6) {fwd}
}
phase update once takes () gives () {
  update.adamw(%4, %5) {upd units=[u0] scale=0.5 ranges=[0, 1024, 0]}
}
)";

TEST(Text, RoundTrip) {
  Result<Program> program = Parse(kTwoLayer);
  ASSERT_TRUE(program.ok()) << program.error().ToString();
  EXPECT_EQ(Print(*program), kTwoLayer);
  EXPECT_EQ(Print(program->Clone()), kTwoLayer);
}

TEST(Text, CompactRenumbers) {
  Result<Program> program = Parse(kTwoLayer);
  ASSERT_TRUE(program.ok());
  program->phases[0].ops.erase(program->phases[0].ops.begin() + 2);  // %7, unused
  program->Compact();
  std::string text = Print(*program);
  EXPECT_NE(text.find("%7: f32[32,32]{1,32} in %6+0 = view(%6)"), std::string::npos) << text;
  EXPECT_NE(text.find("aten.mm(%2, %7)"), std::string::npos) << text;
  EXPECT_EQ(program->num_values(), 10);
  Result<Program> again = Parse(text);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(Print(*again), text);
}

}  // namespace
}  // namespace interlace
