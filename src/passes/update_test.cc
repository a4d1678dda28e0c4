// The norm counts each element once, whatever the placement of parameters.
#include <gtest/gtest.h>

#include "ir/testing/interpreter.h"
#include "ir/text.h"
#include "passes/pass_test_support.h"

namespace interlace {
namespace {

struct Placed {
  std::string name, sizes, cuts;  // sizes of a part
  int64_t elements = 0;           // of a part
};

// Each parameter in a unit of its own, sharded over dp, with the gradient w * w.
std::string StepText(const std::string& mesh, const std::vector<Placed>& params) {
  std::string units, declared, states, ops;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto id = [&](int64_t base) { return "%" + std::to_string(base + static_cast<int64_t>(i)); };
    const std::string unit = "u" + std::to_string(i), full = std::to_string(params[i].elements),
                      shard = std::to_string(params[i].elements / 2);
    units += "unit " + unit + " dp f32 numel " + full + " shard " + shard + "\n";
    declared += "param " + id(0) + ": f32[" + params[i].sizes + "] \"" + params[i].name + "\" trainable group 0 unit " +
                unit + "+0" + params[i].cuts + "\n";
    states += "state " + id(10) + ": f32[" + shard + "] " + unit + ".shard persistent\nstate " + id(20) + ": f32[" +
              shard + "] " + unit + ".grad step\n";
    ops += "  " + id(30) + ": f32[" + full + "] = gather.start(" + id(10) + ") {fwd units=[" + unit +
           "]}\n  gather.wait(" + id(30) + ") {fwd}\n  " + id(40) + ": f32[" + full + "] = aten.mul.Tensor(" + id(30) +
           ", " + id(30) + ") {bwd}\n  " + id(50) + ": f32[" + shard + "] into " + id(20) + "+0 = reduce.start(" +
           id(40) + ") {bwd units=[" + unit + "]}\n  reduce.wait(" + id(50) + ") {bwd}\n";
  }
  return "interlace 1 sharded\n" + mesh + "step 1 reduce_each\ngroup 0 adamw\n" + units + declared + states +
         "phase micro_batch takes () gives () {\n" + ops + "}\n";
}

Program Updated(const std::string& text) {
  Result<Program> program = Parse(text);
  EXPECT_TRUE(program.ok()) << program.error().ToString() << text;
  if (!program.ok()) return Program();
  EXPECT_EQ(Print(*program), text);
  const Status done = Apply(*program, "update(clip=0.5)");  // and verified
  EXPECT_TRUE(done.ok()) << done.error().ToString();
  return std::move(*program);
}

testing::RunResult Ran(const Program& program) {
  Result<testing::RunResult> result = testing::Interpret(program, {.steps = 3});
  EXPECT_TRUE(result.ok()) << result.error().ToString() << Print(program);
  return result.ok() ? std::move(*result) : testing::RunResult();
}

TEST(Update, TheNormCountsEachElementOnce) {
  const std::string dp = "mesh dp 2\n", tp = dp + "mesh tp 2\n", ep = tp + "mesh ep 2\n";
  const testing::RunResult whole =
      Ran(Updated(StepText(dp, {{"w", "64,64", "", 4096}, {"b", "64", "", 64}, {"e", "128,32", "", 4096}})));
  ASSERT_EQ(whole.norms.size(), 3u);
  const struct {
    std::string mesh;
    std::vector<Placed> params;
  } same[] = {
      {tp, {{"w", "64,64", "", 4096}, {"b", "64", "", 64}, {"e", "128,32", "", 4096}}},
      {tp, {{"w", "32,64", " cut tp 0", 2048}, {"b", "64", "", 64}, {"e", "128,32", "", 4096}}},
      {tp, {{"w", "64,32", " cut tp 1", 2048}, {"b", "64", "", 64}, {"e", "64,32", " cut tp 0 blocks 4", 2048}}},
      {ep, {{"w", "64,32", " cut tp 1", 2048}, {"b", "64", "", 64}, {"e", "64,32", " cut ep 0", 2048}}},
      {ep,
       {{"w", "32,32", " cut tp 0 cut ep 1", 1024}, {"b", "64", "", 64}, {"e", "32,32", " cut ep 0 cut tp 0", 1024}}},
  };
  for (const auto& test : same) {
    const std::string text = StepText(test.mesh, test.params);
    EXPECT_EQ(testing::FirstDifference(whole, Ran(Updated(text))), "") << text;
  }
  // Blocks of 32 elements are summed in float64 before they are added exactly; a cut through rows of 32 makes others.
  const testing::RunResult other =
      Ran(Updated(StepText(tp, {{"w", "64,64", "", 4096}, {"b", "64", "", 64}, {"e", "128,16", " cut tp 1", 2048}})));
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(other.norms[i], whole.norms[i], 1e-12 * whole.norms[i]);
}

TEST(Update, OneSumForEachSetOfAxes) {
  const Program program =
      Updated(StepText("mesh dp 2\nmesh tp 2\n",
                       {{"w", "32,32", " cut tp 0", 1024}, {"b", "64", "", 64}, {"v", "64", " cut tp 0", 64}}));
  const std::string text = Print(program);
  const size_t begin = text.find("  %24: "), end = text.find("  update.");
  ASSERT_NE(begin, std::string::npos) << text;
  EXPECT_EQ(text.substr(begin, end - begin),
            "  %24: i64[68] = norm.partial(%4, %8) {upd units=[u0, u2]}\n"
            "  %25: i64[68] = all_reduce.start(%24) {upd axis=dp}\n"
            "  all_reduce.wait(%25) {upd}\n"
            "  %26: i64[68] = all_reduce.start(%25) {upd axis=tp}\n"
            "  all_reduce.wait(%26) {upd}\n"
            "  %27: i64[68] = norm.partial(%6) {upd units=[u1]}\n"
            "  %28: i64[68] = all_reduce.start(%27) {upd axis=dp}\n"
            "  all_reduce.wait(%28) {upd}\n"
            "  %29: i64[68] = aten.add.Tensor(%26, %28) {upd}\n"
            "  %30: f64[3] = norm.coef(%29) {upd max_norm=0.5 scale=0.5}\n");
}

// Muon's two rules; three 32 x 32 matrices on two ranks.
std::string MatricesText(const std::string& apply) {
  std::string text =
      StepText("mesh dp 2\n", {{"a", "32,32", "", 1024}, {"b", "32,32", "", 1024}, {"c", "32,32", "", 1024}});
  const std::string groups =
      "rule 0 \"Muon\" (m) {\n  form {\n    m = lerp(m, g, n0)\n    w = copy(m)\n  }\n}\n"
      "rule 1 \"Muon.apply\" () {\n  form {\n    w = add(w, g, n0)\n  }\n}\n"
      "group 0 rule 0 orthogonal apply " +
      apply +
      " steps 1 by 2.0 -1.5 0.5 eps 1e-07 ratio original\n"
      "group 1 rule 1\n";
  return text.replace(text.find("group 0 adamw\n"), 14, groups);
}

TEST(Update, MatricesAreDealtToTheRanksInRounds) {
  const Program program = Updated(MatricesText("1"));
  std::string ops;
  for (const OpId id : program.UpdatePhase()->ops) {
    const Op& op = program.op(id);
    if (op.kind != OpKind::kView) ops += op.name + (op.units.empty() ? "" : ":u" + std::to_string(op.units[0])) + "\n";
  }
  const std::string
      send = "aten._to_copy\n",
      iterations =
          "aten.linalg_vector_norm\naten.clamp\naten.div.Tensor\naten.mm\naten.addmm\naten.addmm\nall_to_all.start\n";
  EXPECT_EQ(ops.substr(ops.find("\ncopy\n") + 1),  // behind the norm
            "copy\nupdate.rule:u0\n" + send + "copy\nupdate.rule:u1\n" + send + "aten.cat\nall_to_all.start\n" +
                "copy\nupdate.rule:u2\n" + send + "aten.cat\nall_to_all.start\n" +  // the next round travels
                "all_to_all.wait\n" + iterations + "all_to_all.wait\n" + iterations + "all_to_all.wait\n" +
                "aten._to_copy\nupdate.rule:u0\naten._to_copy\nupdate.rule:u1\nall_to_all.wait\n" +
                "aten._to_copy\nupdate.rule:u2\n");
}

TEST(Update, MatricesNeedARuleToApplyThem) {
  Result<Program> program = Parse(MatricesText("7"));
  ASSERT_TRUE(program.ok()) << program.error().ToString();
  const Status done = Apply(*program, "update");
  ASSERT_FALSE(done.ok());
  EXPECT_NE(done.error().ToString().find("group 0 applies its matrices by group 7, which has no rule"),
            std::string::npos)
      << done.error().ToString();
}

// Adafactor's three rules; a vector and two matrices on two ranks, which cut the first amid a row.
std::string FactoredText(const std::string& apply) {
  std::string text = StepText("mesh dp 2\n", {{"a", "3,32", "", 128}, {"b", "64", "", 64}, {"c", "2,5,16", "", 192}});
  const std::string groups =
      "rule 0 \"Adafactor\" () {\n  form {\n    w = copy(g)\n  }\n}\n"
      "rule 1 \"Adafactor.average\" () {\n  form {\n    w = lerp(w, g, n0)\n  }\n}\n"
      "rule 2 \"Adafactor.apply\" () {\n  form {\n    w = add(w, g, n0)\n  }\n}\n"
      "group 0 rule 0 factored average 1 apply " +
      apply +
      " eps 1e-07 0.001 clip 1.0\n"
      "group 1 rule 1\n"
      "group 2 rule 2\n";
  return text.replace(text.find("group 0 adamw\n"), 14, groups);
}

TEST(Update, OnlySumsOfFactoredParametersTravel) {
  const Program program = Updated(FactoredText("2"));
  std::string ops;
  for (const OpId id : program.UpdatePhase()->ops) {
    const Op& op = program.op(id);
    if (op.kind == OpKind::kUpdateRule) ops += op.Attr("rule")->text + ":u" + std::to_string(op.units[0]) + "\n";
    if (op.kind == OpKind::kAllReduceStart) ops += "all_reduce\n";
  }
  EXPECT_EQ(ops.substr(ops.find("Adafactor")),  // behind the norm
            "Adafactor:u0\nAdafactor:u1\nAdafactor:u2\nall_reduce\n"
            "Adafactor.average:u3\nAdafactor.average:u4\nAdafactor.average:u1\n"
            "Adafactor.average:u5\nAdafactor.average:u6\nall_reduce\n"
            "Adafactor.apply:u0\nAdafactor.apply:u1\nAdafactor.apply:u2\n");
  const std::string text = Print(program);
  for (const char* line :
       {"f32[64] u3.row_var_of_u0 persistent", "f32[64] u4.col_var_of_u0 persistent", "f32[32] u1.variance persistent",
        "f32[64] u5.row_var_of_u2 persistent", "group 0 rule 0 factored average 1 apply 2 eps 1e-07 0.001 clip 1.0\n"})
    EXPECT_NE(text.find(line), std::string::npos) << line << "\n" << text;
}

TEST(Update, FactoredParametersNeedTheirRules) {
  Result<Program> program = Parse(FactoredText("7"));
  ASSERT_TRUE(program.ok()) << program.error().ToString();
  const Status done = Apply(*program, "update");
  ASSERT_FALSE(done.ok());
  EXPECT_NE(done.error().ToString().find("group 0 makes a part of its step by group 7, which has no rule"),
            std::string::npos)
      << done.error().ToString();
}

}  // namespace
}  // namespace interlace
