#include "ir/program.h"

#include <gtest/gtest.h>

#include "ir/op_table.h"
#include "ir/text.h"

namespace interlace {
namespace {

Program FromText(std::string_view text) {
  Result<Program> program = Parse(text);
  EXPECT_TRUE(program.ok()) << program.error().ToString();
  return program.ok() ? std::move(*program) : Program();
}

TEST(Program, StridesAndBytes) {
  Program program;
  Type type{DType::kF32, {2, 3, 4}, {}};
  type.strides = program.ContiguousStrides(type.sizes);
  EXPECT_EQ(type.strides, (std::vector<Dim>{12, 4, 1}));
  EXPECT_EQ(*program.StorageBytes(type), 96);
  EXPECT_TRUE(program.IsContiguous(type));
  Type transposed{DType::kBF16, {3, 2}, {1, 3}};
  EXPECT_FALSE(program.IsContiguous(transposed));
  EXPECT_EQ(*program.StorageBytes(transposed), 12);
  EXPECT_TRUE(program.IsContiguous({DType::kF32, {5, 1}, {1, 77}}));
  EXPECT_EQ(*program.StorageBytes({DType::kF32, {5, 0}, {1, 1}}), 0);
  EXPECT_EQ(*program.StorageBytes({DType::kF64, {}, {}}), 8);
  EXPECT_EQ(*program.StorageBytes({DType::kF32, {7}, {0}}), 4);
  Dim b = program.dims.Symbol("b");
  Type symbolic{DType::kF32, {b, 4}, {}};
  symbolic.strides = program.ContiguousStrides(symbolic.sizes);
  EXPECT_EQ(program.dims.ToString(program.NumElements(symbolic)), "4*b");
  EXPECT_EQ(program.StorageBytes(symbolic).error().message, "the size b is not a number yet; bind its symbols first");
  Type huge{DType::kF32, {int64_t{1} << 62, 4}, {4, 1}};
  EXPECT_EQ(program.StorageBytes(huge).error().message, "the storage does not fit in 64 bits");
}

TEST(Program, BuildByHand) {
  Program program;
  program.phases.push_back({"micro_batch", {}, {}, {}});
  ValueId x = program.AddValue(ValueKind::kInput, {DType::kF32, {4, 2}, {}}).id;
  program.inputs.push_back({x, "x"});
  Op& relu = program.AddOp("aten.relu");
  relu.args = {Arg::Of(x)};
  ValueId y = program.AddResult(relu, {DType::kF32, {4, 2}, {}});
  Op& view = program.AddOp("view");
  view.args = {Arg::Of(y)};
  ValueId z = program.AddView(view, {DType::kF32, {2}, {}}, y, 6);
  Op& output = program.AddOp("output");
  output.args = {Arg::Of(z)};
  output.SetAttr("name", Arg::String("row"));
  output.SetAttr("name", Arg::String("last"));
  program.phases[0].ops = {relu.id, view.id, output.id};
  EXPECT_EQ(
      Print(program),
      "interlace 1 captured\nstep 1 reduce_each\ninput %0: f32[4,2] \"x\"\nphase micro_batch takes () gives () {\n"
      "  %1: f32[4,2] = aten.relu(%0)\n  %2: f32[2] in %1+6 = view(%1)\n  output(%2) {name=\"last\"}\n}\n");
  EXPECT_EQ(program.RootOf(z), y);
  EXPECT_EQ(program.value(z).def, view.id);
  Program clone = program.Clone();
  ReplaceUses(clone, clone.phases[0], z, y);
  EXPECT_EQ(PrintOp(clone, clone.op(output.id)), "output(%1) {name=\"last\"}");
  EXPECT_EQ(PrintOp(program, program.op(output.id)), "output(%2) {name=\"last\"}");
  EXPECT_EQ(program.AddValueWithId(1, ValueKind::kInput, {}).error().message, "%1 is defined twice");
  EXPECT_EQ(program.AddValueWithId(-3, ValueKind::kInput, {}).error().message, "value id -3 is out of range");
}

TEST(Program, CompactKeepsMeaning) {
  Program program = FromText(
      "interlace 1 sharded\nstep 1 reduce_each\ninput %7: f32[4] \"x\"\nstate %3: f32[8] full persistent\n"
      "phase micro_batch takes (%30: f32[4]) gives (%21) {\n"
      "  %9: f32[4] = aten.exp(%7)\n  %8: f32[2] in %3+2 = view(%3)\n"
      "  %21: f32[4], _ = aten.pair(%30, [%7, %7], w=%8) {writes=[%3]}\n}\n");
  program.phases[0].ops.erase(program.phases[0].ops.begin());
  program.Compact();
  EXPECT_EQ(Print(program),
            "interlace 1 sharded\nstep 1 reduce_each\ninput %0: f32[4] \"x\"\nstate %1: f32[8] full persistent\n"
            "phase micro_batch takes (%2: f32[4]) gives (%4) {\n"
            "  %3: f32[2] in %1+2 = view(%1)\n  %4: f32[4], _ = aten.pair(%2, [%0, %0], w=%3) {writes=[%1]}\n}\n");
  EXPECT_EQ(program.num_values(), 5);
  EXPECT_EQ(program.num_ops(), 2);
  EXPECT_EQ(program.value(4).def, 1);
}

TEST(Program, RunOrder) {
  Program program = FromText(
      "interlace 1 sharded\nstep 5 reduce_each\nrun micro_batch.first 0\nrun micro_batch.middle 1 x3\n"
      "run micro_batch.last 4\nrun update\nphase micro_batch.first takes () gives () {\n}\n"
      "phase micro_batch.middle takes () gives () {\n}\nphase micro_batch.last takes () gives () {\n}\n"
      "phase update once takes () gives () {\n}\n");
  std::string order;
  for (const auto& [phase, count] : program.RunOrder()) order += phase->name + "*" + std::to_string(count) + " ";
  EXPECT_EQ(order, "micro_batch.first*1 micro_batch.middle*3 micro_batch.last*1 update*1 ");
  EXPECT_EQ(program.RunsOfStep()[1].first, 1);
  EXPECT_EQ(program.MicroBatchPhase(), nullptr);
  EXPECT_EQ(program.UpdatePhase(), &program.phases[3]);
}

TEST(OpTable, NamesLanesEffects) {
  EXPECT_EQ(KindOf("gather.start"), OpKind::kGatherStart);
  EXPECT_EQ(KindOf("gather.begin"), OpKind::kUnknown);  // but of our family
  EXPECT_EQ(KindOf("frobnicate"), OpKind::kUnknown);
  EXPECT_EQ(KindOf("aten.mm"), OpKind::kLibrary);
  EXPECT_EQ(KindOf("torchvision.nms"), OpKind::kLibrary);
  for (const OpTraits& row : OpTable()) {
    EXPECT_EQ(KindOf(row.name), row.kind);
    EXPECT_EQ(&TraitsOf(row.kind), &row);
    EXPECT_FALSE(row.help.empty()) << row.name;
    if (row.side == Side::kWhole) continue;
    EXPECT_EQ(TraitsOf(row.partner).partner, row.kind) << row.name;
    EXPECT_NE(TraitsOf(row.partner).side, row.side) << row.name;
  }
  for (std::string_view name : {"compute", "gather", "reduce", "h2d", "d2h", "file", "p2p"}) {
    EXPECT_EQ(LaneName(*ParseLane(name)), name);
  }
  EXPECT_FALSE(ParseLane("gpu").has_value());
  Program program = FromText(
      "interlace 1 sharded\nmesh dp 1\nstep 1 reduce_each\nunit u0 dp f32 numel 32 shard 32\n"
      "state %0: f32[32] u0.full persistent\nstate %1: f32[32] u0.grad persistent\nstate %2: f32[32] u0.exp_avg "
      "persistent\n"
      "state %3: f32[32] u0.exp_avg_sq persistent\nphase update once takes () gives () {\n"
      "  update.adamw(%0, %1, %2, %3) {units=[u0] scale=1.0 ranges=[]}\n  update.sgd(%0, %1, %2) {units=[u0] "
      "momentum=true}\n"
      "  %4: f32[32] into %1+0 = aten.neg(%0)\n  %5: f32[32] = aten.neg(%0) {lane=d2h}\n  assign(%0, %5)\n"
      "  aten.add_(%1, %0) {writes=[%1]}\n}\n");
  auto written = [&](int op) { return WrittenOperands(program, program.op(op)); };
  EXPECT_EQ(written(0), (std::vector<ValueId>{0, 2, 3}));
  EXPECT_EQ(written(1), (std::vector<ValueId>{0, 2}));
  EXPECT_EQ(written(2), (std::vector<ValueId>{}));
  EXPECT_EQ(written(4), (std::vector<ValueId>{0}));
  EXPECT_EQ(written(5), (std::vector<ValueId>{1}));
  EXPECT_TRUE(HasEffect(program, program.op(2)));  // placed
  EXPECT_FALSE(HasEffect(program, program.op(3)));
  EXPECT_TRUE(HasEffect(program, program.op(5)));  // writes
  EXPECT_EQ(LaneOf(program.op(3)), Lane::kD2H);
  EXPECT_EQ(LaneOf(program.op(0)), Lane::kCompute);
}

constexpr char kSymbolic[] =
    "interlace 1 captured\nmesh dp 2\nsymbol b 2 64\nsymbol s 2 4096\nstep 1 reduce_each\ninput %0: f32[b,s] \"x\"\n"
    "phase micro_batch takes () gives () {\n  %1: f32[b,s] = aten.relu(%0)\n"
    "  %2: f32[s]{1} in %1+b*s-s = view(%1)\n  %3: f32[b*s] in %1+0 = aten.view(%1, [b*s, max(b,8)])\n}\n";

TEST(Bind, NumbersEverywhere) {
  Program program = FromText(kSymbolic);
  Result<Program> bound = Bind(program, {{"b", 4}, {"s", 16}});
  ASSERT_TRUE(bound.ok()) << bound.error().ToString();
  EXPECT_EQ(Print(*bound),
            "interlace 1 captured\nmesh dp 2\nstep 1 reduce_each\ninput %0: f32[4,16] \"x\"\n"
            "phase micro_batch takes () gives () {\n  %1: f32[4,16] = aten.relu(%0)\n"
            "  %2: f32[16] in %1+48 = view(%1)\n  %3: f32[64] in %1+0 = aten.view(%1, [64, 8])\n}\n");
  Result<Program> part = Bind(program, {{"s", 16}});
  ASSERT_TRUE(part.ok());
  EXPECT_NE(Print(*part).find("  %2: f32[16] in %1+16*b-16 = view(%1)"), std::string::npos) << Print(*part);
  EXPECT_EQ(part->symbols.size(), 1u);
}

TEST(Bind, Errors) {
  Program program = FromText(kSymbolic);
  auto message = [&](const Program& p, const Binding& binding) {
    Result<Program> bound = Bind(p, binding);
    return bound.ok() ? "ok" : bound.error().ToString();
  };
  EXPECT_EQ(message(program, {{"b", 1}}),
            "symbol 'b' = 1 is out of its range 2 to 64; capture the program again for such a size");
  EXPECT_EQ(message(program, {{"bb", 4}}), "the program has no symbol 'bb', did you mean 'b'?");
  EXPECT_EQ(message(program, {{"rank_dp", 2}}),
            "symbol 'rank_dp' = 2 is out of its range 0 to 1; capture the program again for such a size");
  Program wide = FromText(
      "interlace 1 captured\nsymbol b 1 9223372036854775807\nstep 1 reduce_each\ninput %0: f32[b,b] \"x\"\n"
      "phase micro_batch takes () gives () {\n}\n");
  EXPECT_EQ(message(wide, {{"b", int64_t{1} << 31}}),
            "value %0: the storage does not fit in 64 bits under this binding");
  Program view = FromText(
      "interlace 1 captured\nsymbol b 1 64\nstep 1 reduce_each\ninput %0: f32[b] \"x\"\n"
      "phase micro_batch takes () gives () {\n  %1: f32[b] = aten.exp(%0)\n  %2: f32[8] in %1+0 = view(%1)\n"
      "  %3: f32[b-9] = aten.tail(%1)\n}\n");
  EXPECT_EQ(message(view, {{"b", 12}}), "ok");
  EXPECT_EQ(message(view, {{"b", 6}}), "value %3 gets the negative size -3 under this binding");
  view.phases[0].ops.pop_back();
  view.Compact();
  EXPECT_EQ(message(view, {{"b", 6}}),
            "%2 lies outside its storage: 32 bytes from element 0 of %1, which has 24 bytes under this binding; the "
            "model was "
            "captured for other sizes");
}

}  // namespace
}  // namespace interlace
