// The search for a plan: folded programs estimate as whole ones, roles are found, and what is chosen is never slower in
// prediction than no plan or the model's.
#include "passes/tensor/auto.h"

#include <random>
#include <set>

#include "base/testing/rounds.h"
#include "ir/testing/random_program.h"
#include "ir/verifier.h"
#include "passes/explain.h"
#include "passes/pass_test_support.h"
#include "passes/tensor/estimate.h"
#include "passes/tensor/fold.h"

namespace interlace {
namespace {

using namespace tensor;

// Blocks x + down(relu(up(x))) on `rows` rows, forward and backward; nothing is run, so sizes may be real ones.
std::string Deep(int blocks, int64_t rows, int64_t width, int64_t inner, const std::string& meta = "") {
  const std::string x = "f32[" + std::to_string(rows) + "," + std::to_string(width) + "]",
                    h = "f32[" + std::to_string(rows) + "," + std::to_string(inner) + "]",
                    up = "f32[" + std::to_string(inner) + "," + std::to_string(width) + "]",
                    down = "f32[" + std::to_string(width) + "," + std::to_string(inner) + "]";
  const auto turned = [](int64_t a, int64_t b, int64_t step) {
    return "f32[" + std::to_string(a) + "," + std::to_string(b) + "]{1," + std::to_string(step) + "}";
  };
  std::string text = "interlace 1 captured\nmeta model \"deep\"\n" + meta +
                     "mesh dp 1\nmesh tp 2\nstep 1 reduce_each\ngroup 0 adamw\n";
  text += "module 0 \"\" \"Deep\"\n";
  for (int i = 0; i < blocks; ++i) {
    const std::string path = "layers." + std::to_string(i);
    text += "module " + std::to_string(2 * i + 1) + " \"" + path + ".up\" \"Linear\"\n";
    text += "module " + std::to_string(2 * i + 2) + " \"" + path + ".down\" \"Linear\"\n";
  }
  int next = 0;
  const auto fresh = [&] { return "%" + std::to_string(next++); };
  std::vector<std::string> ups, downs;
  for (int i = 0; i < blocks; ++i) {
    const std::string path = "layers." + std::to_string(i);
    ups.push_back(fresh());
    downs.push_back(fresh());
    text += "param " + ups.back() + ": " + up + " \"" + path + ".up.weight\" trainable group 0\n";
    text += "param " + downs.back() + ": " + down + " \"" + path + ".down.weight\" trainable group 0\n";
  }
  std::string at = fresh();
  text += "input " + at + ": " + x + " \"x\"\nphase micro_batch takes () gives () {\n";
  std::vector<std::string> xs, rs;
  const auto line = [&](const std::string& type, const std::string& call, const std::string& tail) {
    const std::string id = fresh();
    text += "  " + id + ": " + type + " = " + call + " {" + tail + "}\n";
    return id;
  };
  for (int i = 0; i < blocks; ++i) {
    const std::string up_tail = "fwd m" + std::to_string(2 * i + 1), down_tail = "fwd m" + std::to_string(2 * i + 2);
    xs.push_back(at);
    const std::string t = line(turned(width, inner, width) + " in " + ups[i] + "+0", "view(" + ups[i] + ")", up_tail);
    rs.push_back(line(h, "aten.relu(" + line(h, "aten.mm(" + at + ", " + t + ")", up_tail) + ")", up_tail));
    const std::string d =
        line(turned(inner, width, inner) + " in " + downs[i] + "+0", "view(" + downs[i] + ")", down_tail);
    at = line(x, "aten.add.Tensor(" + at + ", " + line(x, "aten.mm(" + rs[i] + ", " + d + ")", down_tail) + ")",
              down_tail);
  }
  const std::string loss = line("f32[]", "aten.sum(" + at + ")", "fwd m0");
  text += "  output(" + loss + ") {fwd name=\"loss\"}\n";
  std::string g = line(x, "aten.ones_like(" + at + ")", "bwd m0");
  for (int i = blocks; i-- > 0;) {
    const std::string up_tail = "bwd m" + std::to_string(2 * i + 1), down_tail = "bwd m" + std::to_string(2 * i + 2);
    const std::string gt = line(turned(width, rows, width) + " in " + g + "+0", "view(" + g + ")", down_tail);
    text += "  grad(" + downs[i] + ", " + line(down, "aten.mm(" + gt + ", " + rs[i] + ")", down_tail) + ") {bwd}\n";
    const std::string gr = line(h, "aten.mm(" + g + ", " + downs[i] + ")", down_tail);
    const std::string gu = line(h, "aten.threshold_backward(" + gr + ", " + rs[i] + ", 0)", up_tail);
    const std::string gut = line(turned(inner, rows, inner) + " in " + gu + "+0", "view(" + gu + ")", up_tail);
    text += "  grad(" + ups[i] + ", " + line(up, "aten.mm(" + gut + ", " + xs[i] + ")", up_tail) + ") {bwd}\n";
    g = line(x, "aten.add.Tensor(" + g + ", " + line(x, "aten.mm(" + gu + ", " + ups[i] + ")", up_tail) + ")", up_tail);
  }
  return text + "}\n";
}

Program Read(const std::string& text) {
  Result<Program> program = Parse(text, "test");
  EXPECT_TRUE(program.ok()) << program.error().ToString();
  return std::move(*program);
}

PassCosts H100(int64_t ranks) {
  PassCosts costs;
  costs.cluster = *LoadCluster("h100-80gb-" + std::to_string(ranks), "cluster");
  costs.limit = costs.cluster.MemoryLimitBytes();
  return costs;
}

// The first block is cut and leaves each rank half of the rows: gradients of the other weights are sums over ranks.
TEST(Overlap, LargeGradientsTravelWhileBackwardComputes) {
  const std::string cuts = "meta tensor \"layers.0.up.weight 0; layers.0.down.weight 1\"\n";
  const auto starts_before_the_last_product = [&](const std::string& options) {
    const std::string text =
        RunText(Deep(4, 4096, 512, 1024, cuts), "canonicalize,tensor(plan=model" + options + "),overlap");
    const size_t last = text.rfind("aten.mm(");
    EXPECT_NE(last, std::string::npos) << text;
    int count = 0;
    for (size_t at = text.find("all_reduce.start("); at < last; at = text.find("all_reduce.start(", at + 1)) ++count;
    return count;
  };
  EXPECT_GE(starts_before_the_last_product(""), starts_before_the_last_product(",bucket=67108864") + 5);
}

TEST(TensorFold, FourOfManyBlocksStay) {
  const Program whole = Read(Deep(9, 64, 32, 96));
  const Folded folded = Fold(whole);
  const Status good = Verify(folded.program);
  EXPECT_TRUE(good.ok()) << good.error().ToString();
  ASSERT_EQ(folded.program.params.size(), 8u);
  EXPECT_EQ(folded.program.params[6].name, "layers.8.up.weight");
  double blocks = 0;
  for (OpId id : folded.program.phases[0].ops) {
    const Op& op = folded.program.op(id);
    if (op.name == "aten.relu") blocks += folded.times[op.module];
  }
  EXPECT_EQ(blocks, 9);
}

TEST(TensorFold, EstimatesAsTheWholeProgram) {
  const Program whole = Read(Deep(7, 4096, 512, 2048));
  const std::vector<Role> roles = RolesOf(whole, 2);
  const Folded folded = Fold(whole), unfolded{whole.Clone(), std::vector<double>(whole.modules.size(), 1.0)};
  const PassCosts costs = H100(2);
  Steps few_steps(folded.program), all_steps(unfolded.program);
  const auto few = std::move(*Estimate::Create(folded, roles, few_steps, {}, costs));
  const auto all = std::move(*Estimate::Create(unfolded, roles, all_steps, {}, costs));
  ASSERT_EQ(roles.size(), 2u);
  for (int32_t up = 0; up < 3; ++up) {
    for (int32_t down = 0; down < 3; ++down) {
      const double expected = all->Of({up, down}).ps;
      EXPECT_NEAR(few->Of({up, down}).ps, expected, 1e-9 * expected) << up << " " << down;
    }
  }
}

// How the gradient of an embedding is cut its parameter decides: no operand says it.
constexpr const char* kWords = R"(interlace 1 captured
mesh dp 1
mesh tp 2
step 1 reduce_each
group 0 adamw
module 0 "" "Words"
param %0: f32[12,8] "words.weight" trainable group 0
input %1: i64[6] "ids"
phase micro_batch takes () gives () {
  %2: f32[6,8] = aten.embedding(%0, %1) {fwd m0}
  %3: f32[] = aten.sum(%2) {fwd m0}
  output(%3) {fwd name="loss"}
  %4: f32[6,8] = aten.ones([6,8]) {bwd m0}
  %5: f32[12,8] = aten.embedding_dense_backward(%4, %1, 12, -1, false) {bwd m0}
  grad(%0, %5) {bwd}
}
)";

// Random ways that are added up from what others met, against each propagated by itself.
void CheckSeen(const Program& program, uint64_t seed, std::set<double>& times) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  const std::vector<Role> roles = RolesOf(program, 2);
  const Folded folded = Fold(program);
  const PassCosts costs = H100(2);
  const CutterOptions options{.bucket = 512};
  Steps shared(folded.program);
  const auto seen = std::move(*Estimate::Create(folded, roles, shared, options, costs));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 40; ++i) {
    Choices choices;
    for (const Role& role : roles) choices.push_back(static_cast<int32_t>(random() % role.choices.size()));
    Steps own(folded.program);
    const auto alone = std::move(*Estimate::Create(folded, roles, own, options, costs));
    const Estimate::Time expected = alone->Of(choices), got = seen->Of(choices);
    ASSERT_EQ(got.ps, expected.ps) << "way " << i;
    ASSERT_EQ(got.gathers_weight, expected.gathers_weight) << "way " << i;
    times.insert(expected.ps);
  }
}

TEST(TensorSteps, WhatWasSeenIsWhatTheCutterDoes) {
  std::set<double> times;
  CheckSeen(Read(kWords), 1, times);
  EXPECT_EQ(times.size(), 3u);
  for (uint64_t seed = 1; seed <= static_cast<uint64_t>(Rounds(20)); ++seed) {
    testing::RandomProgramOptions options;
    options.seed = seed;
    options.layers = 1 + static_cast<int>(seed % 7);
    options.multiple = 6;
    options.cross_entropy = seed % 2 == 0;
    Program program = testing::RandomProgram(options);
    program.mesh = {{"dp", 1}, {"tp", 2}};
    CheckSeen(program, seed, times);
  }
  EXPECT_GT(times.size(), 200u);
}

TEST(TensorRoles, BlocksShareOneAndFusedWeightsSaySo) {
  const std::vector<Role> deep = RolesOf(Read(Deep(4, 8, 4, 12)), 2);
  ASSERT_EQ(deep.size(), 2u);
  EXPECT_EQ(deep[0].pattern, "layers.*.up.weight");
  EXPECT_EQ(deep[0].names.size(), 4u);
  EXPECT_EQ(deep[0].choices, (std::vector<Held>{{-1, 1}, {0, 1}, {1, 1}}));
  const std::vector<Role> attention = RolesOf(Read(GoldenInput("attention.il")), 2);
  ASSERT_EQ(attention.size(), 2u);
  EXPECT_EQ(attention[0].pattern, "qkv.weight");
  EXPECT_EQ(PrintHeld(attention[0].choices[1]), "0 blocks 3");
  ASSERT_EQ(attention[0].biases.size(), 1u);
  EXPECT_EQ(PrintPlan(PlanOf(attention, {1, 2})), "qkv.weight 0 blocks 3; qkv.bias 0 blocks 3; out.weight 1");
  EXPECT_EQ(PrintPlan(PlanOf(attention, {0, 1})), "out.weight 0; out.bias 0");
  EXPECT_TRUE(CheckBlocks(attention, *ReadPlan("qkv.weight 0 blocks 3; qkv.bias 0 blocks 3; out.weight 1")).ok());
  EXPECT_EQ(
      CheckBlocks(attention, *ReadPlan("qkv.weight 0; out.weight 1")).error().message,
      "what 'qkv.weight' makes is taken in 3 parts, and a cut along dimension 0 goes through them: of several weights "
      "in one, write 'qkv.weight 0 blocks 3', which cuts each; of heads, fewer than ranks, write nothing: they stay "
      "whole");
}

// As with adapters: what is not trained has memory and is multiplied with all the same.
TEST(TensorRoles, FrozenWeightsHaveOneToo) {
  std::string text = GoldenInput("attention.il");
  const std::string trained = "\"qkv.weight\" trainable group 0";
  ASSERT_NE(text.find(trained), std::string::npos);
  text.replace(text.find(trained), trained.size(), "\"qkv.weight\" frozen");
  const std::vector<Role> roles = RolesOf(Read(text), 2);
  ASSERT_EQ(roles.size(), 2u);
  EXPECT_EQ(PrintPlan(PlanOf(roles, {1, 2})), "qkv.weight 0 blocks 3; qkv.bias 0 blocks 3; out.weight 1");
  EXPECT_EQ(roles[0].bytes - roles[0].trained_bytes, 24 * 8 * 4);
}

TEST(TensorAuto, IsNeverSlowerThanThePlanOfTheModelOrNone) {
  for (int64_t rows : {64, 4096, 32768}) {
    const Program program = Read(Deep(5, rows, 1024, 4096));
    for (const char* own : {"layers.*.up.weight 0; layers.*.down.weight 1", "layers.*.up.weight 1", ""}) {
      const Result<FoundPlan> found = FindPlan(program, *ReadPlan(own), {}, H100(2));
      ASSERT_TRUE(found.ok()) << found.error().ToString();
      bool whole = false;
      for (const Judged& other : found->judged) {
        EXPECT_LE(found->judged[0].time_ps, other.time_ps) << rows << ": " << other.name;
        whole = whole || other.plan.empty();
      }
      EXPECT_TRUE(whole);
    }
  }
}

TEST(TensorAuto, SmallBlocksStayWholeAndLargeOnesAreCut) {
  EXPECT_TRUE(FindPlan(Read(Deep(5, 8, 64, 256)), {}, {}, H100(2))->judged[0].plan.empty());
  const FoundPlan large = *FindPlan(Read(Deep(5, 8192, 4096, 16384)), {}, {}, H100(2));
  EXPECT_EQ(PrintPlan(large.judged[0].plan), "layers.*.up.weight 0; layers.*.down.weight 1");
}

TEST(TensorAuto, WhatDoesNotFitIsNotChosen) {
  PassCosts costs = H100(2);
  const Program program = Read(Deep(5, 8, 256, 1024));
  const FoundPlan free = *FindPlan(program, {}, {}, costs);
  ASSERT_TRUE(free.judged[0].plan.empty());
  costs.limit = free.judged[0].bytes * 3 / 4;
  const FoundPlan tight = *FindPlan(program, {}, {}, costs);
  EXPECT_LE(tight.judged[0].bytes, costs.limit);
  EXPECT_FALSE(tight.judged[0].plan.empty());
}

TEST(TensorAuto, WhatRanksDoNotDivideIsTold) {
  EXPECT_EQ(DoesNotDivide("lm_head.weight", 0, 50257, 1, 2),
            "dimension 0 of 'lm_head.weight', 50257 in 1 block, cannot be cut into 2 equal parts; 50258 could, and "
            "50257 into "
            "29");
  EXPECT_EQ(DoesNotDivide("qkv.weight", 0, 90, 3, 4),
            "dimension 0 of 'qkv.weight', 90 in 3 blocks, cannot be cut into 4 equal parts; 96 could, and 90 into 2, "
            "3, 5, 6, "
            "10, 15, 30");
  const std::string meta = "meta tensor \"layers.*.up.weight 0; layers.*.down.weight 1\"\n";
  Program program = Read(Deep(2, 8, 4, 9, meta));
  ASSERT_TRUE(Apply(program, "tensor(plan=model)").ok());
  EXPECT_TRUE(program.params[0].cuts.empty());
  const Result<std::string> why = Explain(program);
  ASSERT_TRUE(why.ok()) << why.error().ToString();
  EXPECT_NE(
      why->find("dimension 0 of 'layers.0.up.weight', 9 in 1 block, cannot be cut into 2 equal parts; 10 could, and 9 "
                "into 3, 9: it stays whole"),
      std::string::npos)
      << *why;
  program = Read(Deep(2, 8, 4, 9));
  ASSERT_TRUE(Apply(program, "tensor(cluster=h100-80gb-2)").ok());
  EXPECT_NE(program.Meta("tensor.notes")->find("dimension 0 of 'layers.*.up.weight'"), std::string::npos);
}

TEST(TensorAuto, ThePlanIsWrittenDownAndReadBack) {
  const std::string text = Deep(5, 8192, 2048, 8192);
  Program program = Read(text);
  const Status done = Apply(program, "tensor(cluster=h100-80gb-2)");
  ASSERT_TRUE(done.ok()) << done.error().ToString();
  Program again = Read(Deep(5, 8192, 2048, 8192, "meta tensor \"" + *program.Meta("tensor") + "\"\n"));
  ASSERT_TRUE(Apply(again, "tensor(plan=model)").ok());
  EXPECT_EQ(Phases(Print(again)), Phases(Print(program)));
  const Result<std::string> why = Explain(program);
  ASSERT_TRUE(why.ok()) << why.error().ToString();
  EXPECT_NE(why->find("chosen"), std::string::npos);
  EXPECT_NE(why->find("layers.*.up.weight"), std::string::npos) << *why;
}

}  // namespace
}  // namespace interlace
