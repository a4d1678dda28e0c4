#include <map>
#include <set>
#include <sstream>

#include "ir/liveness.h"
#include "ir/testing/interpreter.h"
#include "passes/pass_table.h"
#include "passes/pass_test_support.h"
#include "passes/passes.h"

namespace interlace {
namespace {

using testing::FirstDifference;
using testing::Interpret;
using testing::InterpretOptions;
using testing::RunResult;

// A residual network of n blocks: up, relu, down, dropout, tanh. A block's activations are 2 of 256 and 6 of 128 bytes.
class Blocks {
 public:
  explicit Blocks(int n) {
    text_ = "interlace 1 captured\nmeta model \"blocks\"\nstep 1 reduce_each\ngroup 0 adamw\nmodule 0 \"\" \"Net\"\n";
    for (int i = 0; i < n; ++i) {
      std::string block = "blocks." + std::to_string(i);
      Line("module ", 3 * i + 1, " \"", block, "\" \"Block\"");
      Line("module ", 3 * i + 2, " \"", block, ".up\" \"Linear\"");
      Line("module ", 3 * i + 3, " \"", block, ".down\" \"Linear\"");
    }
    for (int i = 0; i < n; ++i) {
      std::string block = " \"blocks." + std::to_string(i);
      Line("param %", 3 * i, ": f32[16,8]", block, ".up.weight\" trainable group 0");
      Line("param %", 3 * i + 1, ": f32[16]", block, ".up.bias\" trainable group 0");
      Line("param %", 3 * i + 2, ": f32[8,16]", block, ".down.weight\" trainable group 0");
    }
    next_ = 3 * n;
    int x = next_++;
    Line("input %", x, ": f32[4,8] \"x\"");
    Line("phase micro_batch takes () gives () {");
    struct Saved {
      int in, relu, scaled, tanh;
    };
    std::vector<Saved> saved;
    for (int i = 0; i < n; ++i) {
      std::string b = Tag("fwd", i, 1), u = Tag("fwd", i, 2), d = Tag("fwd", i, 3);
      int up = Emit("f32[8,16]{1,8} in " + V(3 * i) + "+0", "view(" + V(3 * i) + ")", u);
      int relu = Emit(kWide, "aten.addmm(" + V(3 * i + 1) + ", " + V(x) + ", " + V(up) + ")", u);
      relu = Emit(kWide, "aten.relu(" + V(relu) + ")", b);
      int down = Emit("f32[16,8]{1,16} in " + V(3 * i + 2) + "+0", "view(" + V(3 * i + 2) + ")", d);
      int y = Emit(kNarrow, "aten.mm(" + V(relu) + ", " + V(down) + ")", d);
      int mask = Emit(kNarrow, "aten.bernoulli.p(" + V(y) + ", 0.5)", b + " rng=" + std::to_string(i));
      int scaled = Emit(kNarrow, "aten.div.Tensor(" + V(mask) + ", 0.5)", b);
      int tanh = Emit(kNarrow, "aten.mul.Tensor(" + V(y) + ", " + V(scaled) + ")", b);
      tanh = Emit(kNarrow, "aten.tanh(" + V(tanh) + ")", b);
      saved.push_back({x, relu, scaled, tanh});
      x = Emit(kNarrow, "aten.add.Tensor(" + V(tanh) + ", " + V(x) + ")", b);
    }
    int loss = Emit(kNarrow, "aten.mul.Tensor(" + V(x) + ", " + V(x) + ")", "fwd m0");
    loss = Emit("f32[]", "aten.sum(" + V(loss) + ")", "fwd m0");
    Line("  output(%", loss, ") {fwd m0 name=\"loss\"}");
    int one = Emit("f32[]", "aten.ones_like(" + V(loss) + ")", "bwd m0");
    int g = Emit("f32[4,8]{0,0} in " + V(one) + "+0", "view(" + V(one) + ")", "bwd m0");
    g = Emit(kNarrow, "aten.mul.Tensor(" + V(g) + ", " + V(x) + ")", "bwd m0");
    g = Emit(kNarrow, "aten.mul.Tensor(" + V(g) + ", 2)", "bwd m0");
    for (int i = n; i-- > 0;) {
      std::string b = Tag("bwd", i, 1), u = Tag("bwd", i, 2), d = Tag("bwd", i, 3);
      int gy = Emit(kNarrow, "aten.tanh_backward(" + V(g) + ", " + V(saved[i].tanh) + ")", b);
      gy = Emit(kNarrow, "aten.mul.Tensor(" + V(gy) + ", " + V(saved[i].scaled) + ")", b);
      int t = Emit("f32[8,4]{1,8} in " + V(gy) + "+0", "view(" + V(gy) + ")", d);
      Grad(3 * i + 2, Emit("f32[8,16]", "aten.mm(" + V(t) + ", " + V(saved[i].relu) + ")", d), d);
      int ga = Emit(kWide, "aten.mm(" + V(gy) + ", " + V(3 * i + 2) + ")", d);
      ga = Emit(kWide, "aten.threshold_backward(" + V(ga) + ", " + V(saved[i].relu) + ", 0)", b);
      t = Emit("f32[16,4]{1,16} in " + V(ga) + "+0", "view(" + V(ga) + ")", u);
      Grad(3 * i, Emit("f32[16,8]", "aten.mm(" + V(t) + ", " + V(saved[i].in) + ")", u), u);
      Grad(3 * i + 1, Emit("f32[16]", "aten.sum.dim_IntList(" + V(ga) + ", [0])", u), u);
      if (i == 0) break;
      int gx = Emit(kNarrow, "aten.mm(" + V(ga) + ", " + V(3 * i) + ")", u);
      g = Emit(kNarrow, "aten.add.Tensor(" + V(g) + ", " + V(gx) + ")", b);
    }
    Line("}");
  }

  const std::string& text() const { return text_; }

 private:
  static constexpr const char* kWide = "f32[4,16]";
  static constexpr const char* kNarrow = "f32[4,8]";

  static std::string V(int id) { return "%" + std::to_string(id); }
  static std::string Tag(const char* part, int block, int module) {
    return std::string(part) + " m" + std::to_string(3 * block + module);
  }
  template <typename... Parts>
  void Line(const Parts&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    text_ += out.str() + "\n";
  }
  int Emit(const std::string& type, const std::string& call, const std::string& tags) {
    Line("  %", next_, ": ", type, " = ", call, " {", tags, "}");
    return next_++;
  }
  void Grad(int param, int value, const std::string& tags) { Line("  grad(%", param, ", %", value, ") {", tags, "}"); }

  std::string text_;
  int next_ = 0;
};

int CountOf(const std::string& text, const std::string& what) {
  int count = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++count;
  return count;
}

std::string MetaOf(const std::string& text) {
  size_t at = text.find("meta recompute ");
  return at == std::string::npos ? text : text.substr(at + 15, text.find('\n', at) - at - 15);
}

// A program with a block "h.0" (m1), a trainable parameter %0, a buffer %1 and an input %2, all f32[4,8].
std::string WithBlocks(const std::string& ops) {
  return "interlace 1 captured\nstep 1 reduce_each\ngroup 0 adamw\nmodule 0 \"\" \"Net\"\nmodule 1 \"h.0\" \"Block\"\n"
         "param %0: f32[4,8] \"w\" trainable group 0\nbuffer %1: f32[4,8] \"b\" persistent\ninput %2: f32[4,8] \"x\"\n"
         "phase micro_batch takes () gives () {\n" +
         ops + "}\n";
}

// ---- whole texts ----

struct GoldenCase {
  const char* file;
  const char* pipeline;
};

class RecomputeGolden : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(RecomputeGolden, TextIsAsReviewed) {
  ExpectGolden(GetParam().file, RunText(Blocks(3).text(), GetParam().pipeline));
}

INSTANTIATE_TEST_SUITE_P(
    Files, RecomputeGolden,
    ::testing::Values(GoldenCase{"recompute.full.il", "recompute"},
                      GoldenCase{"recompute.selective.il", "recompute(mode=selective,save=aten.tanh+aten.addmm)"},
                      GoldenCase{"recompute.budget.il", "recompute(mode=budget,bytes=1408)"},
                      GoldenCase{"recompute.shard2.il", "recompute(blocks=blocks.1),shard(ranks=2),update"}),
    [](const auto& info) {
      std::string name = info.param.file;
      for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
      return name;
    });

TEST(Recompute, SmallBeforeAndAfter) {
  std::string forward =
      "  %3: f32[4,8] = aten.mul.Tensor(%2, %0) {fwd m1}\n"
      "  %4: f32[4,8] = aten.relu(%3) {fwd m1}\n"
      "  %5: f32[4,8] = aten.mul.Tensor(%4, %4) {fwd m1}\n"
      "  %6: f32[] = aten.sum(%5) {fwd m0}\n"
      "  output(%6) {fwd m0 name=\"loss\"}\n";
  EXPECT_EQ(Phases(RunText(WithBlocks(forward + "  %7: f32[4,8] = aten.mul.Tensor(%4, 2) {bwd m1}\n"
                                                "  %8: f32[4,8] = aten.threshold_backward(%7, %4, 0) {bwd m1}\n"
                                                "  %9: f32[4,8] = aten.mul.Tensor(%8, %2) {bwd m1}\n"
                                                "  grad(%0, %9) {bwd m1}\n"),
                           "recompute")),
            "phase micro_batch takes () gives () {\n" + forward +
                "  %7: f32[4,8] = aten.mul.Tensor(%2, %0) {bwd m1}\n"
                "  %8: f32[4,8] = aten.relu(%7) {bwd m1}\n"
                "  %9: f32[4,8] = aten.mul.Tensor(%8, 2) {bwd m1}\n"
                "  %10: f32[4,8] = aten.threshold_backward(%9, %8, 0) {bwd m1}\n"
                "  %11: f32[4,8] = aten.mul.Tensor(%10, %2) {bwd m1}\n"
                "  grad(%0, %11) {bwd m1}\n}\n");
}

TEST(Recompute, ViewsFollowTheStorageThatIsMadeAgain) {
  // A view by a forward op, one of that view, and one by a backward op.
  std::string forward =
      "  %3: f32[4,8] = aten.mul.Tensor(%2, %0) {fwd m1}\n"
      "  %4: f32[8,4]{1,8} in %3+0 = aten.t(%3) {fwd m1}\n"
      "  %5: f32[2,4]{1,8} in %3+2 = aten.slice.Tensor(%4, 0, 2, 4) {fwd m1}\n"
      "  %6: f32[] = aten.sum(%5) {fwd m1}\n"
      "  output(%6) {fwd m1 name=\"loss\"}\n";
  EXPECT_EQ(Phases(RunText(WithBlocks(forward + "  %7: f32[4]{8} in %3+2 = aten.select.int(%5, 0, 0) {bwd m1}\n"
                                                "  %8: f32[4,8] = aten.mul.Tensor(%4, %7) {bwd m1}\n"
                                                "  grad(%0, %8) {bwd m1}\n"),
                           "recompute")),
            "phase micro_batch takes () gives () {\n" + forward +
                "  %7: f32[4,8] = aten.mul.Tensor(%2, %0) {bwd m1}\n"
                "  %8: f32[8,4]{1,8} in %7+0 = aten.t(%7) {bwd m1}\n"
                "  %9: f32[2,4]{1,8} in %7+2 = aten.slice.Tensor(%8, 0, 2, 4) {bwd m1}\n"
                "  %10: f32[4]{8} in %7+2 = aten.select.int(%9, 0, 0) {bwd m1}\n"
                "  %11: f32[4,8] = aten.mul.Tensor(%8, %10) {bwd m1}\n"
                "  grad(%0, %11) {bwd m1}\n}\n");
}

TEST(Recompute, AnOpOfSeveralResultsRunsAgainAsAWholeAndItsKeptResultsStay) {
  // As with BatchNorm: %5 is assigned to the buffer after the backward part and is kept, %3 and %4 are not.
  std::string text = RunText(WithBlocks("  %3: f32[4,8], %4: f32[8], %5: f32[4,8] = aten.norm(%2, %0, %1) {fwd m1}\n"
                                        "  %6: f32[] = aten.sum(%3) {fwd m0}\n"
                                        "  output(%4) {fwd m1 name=\"loss\"}\n"
                                        "  %7: f32[4,8] = aten.norm_backward(%4, %5, %2) {bwd m1}\n"
                                        "  grad(%0, %7) {bwd m1}\n"
                                        "  assign(%1, %5) {fwd}\n"),
                             "recompute");
  EXPECT_EQ(text.find("meta recompute"), std::string::npos) << "all that the backward part reads is kept anyway";
  text = RunText(WithBlocks("  %3: f32[4,8], %4: f32[8], %5: f32[4,8] = aten.norm(%2, %0, %1) {fwd m1}\n"
                            "  %6: f32[] = aten.sum(%3) {fwd m1}\n"
                            "  output(%6) {fwd m1 name=\"loss\"}\n"
                            "  %7: f32[4,8] = aten.norm_backward(%4, %5, %2) {bwd m1}\n"
                            "  grad(%0, %7) {bwd m1}\n"
                            "  assign(%1, %5) {fwd}\n"),
                 "recompute");
  EXPECT_NE(text.find("  %7: f32[4,8], %8: f32[8], %9: f32[4,8] = aten.norm(%2, %0, %1) {bwd m1}\n"
                      "  %10: f32[4,8] = aten.norm_backward(%8, %5, %2) {bwd m1}\n"),
            std::string::npos)
      << text;
}

// ---- what never runs twice ----

TEST(Recompute, DrawsInOrderAndWritingAndUnknownOpsRunOnce) {
  for (const char* op :
       {"aten.bernoulli.p(%2, 0.5) {fwd m1 rng=0}", "call.python(%2) {fwd m1 module=\"h.0\" part=\"forward\"}",
        "torchvision.thing(%2) {fwd m1}"}) {
    std::string text = WithBlocks(std::string("  %3: f32[4,8] = ") + op +
                                  "\n  %4: f32[4,8] = aten.tanh(%3) {fwd m1}\n"
                                  "  %5: f32[] = aten.sum(%4) {fwd m1}\n"
                                  "  output(%5) {fwd m1 name=\"loss\"}\n"
                                  "  %6: f32[4,8] = aten.mul.Tensor(%4, %3) {bwd m1}\n"
                                  "  grad(%0, %6) {bwd m1}\n");
    const size_t step = text.find("step 1");
    std::string out = RunText(text.insert(step, "meta rng \"compat\"\n"), "recompute");
    EXPECT_NE(out.find("  %6: f32[4,8] = aten.tanh(%3) {bwd m1}\n  %7: f32[4,8] = aten.mul.Tensor(%6, %3) {bwd m1}\n"),
              std::string::npos)
        << out;
  }
}

TEST(Recompute, ADrawRunsAgainWithItsKey) {
  std::string out = RunText(WithBlocks("  %3: f32[4,8] = aten.bernoulli.p(%2, 0.5) {fwd m1 rng=7}\n"
                                       "  %4: f32[] = aten.sum(%3) {fwd m1}\n"
                                       "  output(%4) {fwd m1 name=\"loss\"}\n"
                                       "  %5: f32[4,8] = aten.mul.Tensor(%3, %2) {bwd m1}\n"
                                       "  grad(%0, %5) {bwd m1}\n"),
                            "recompute");
  EXPECT_NE(out.find("  %5: f32[4,8] = aten.bernoulli.p(%2, 0.5) {bwd m1 rng=7}\n  %6: f32[4,8] = aten.mul.Tensor(%5, "),
            std::string::npos)
      << out;
}

TEST(Recompute, SelectiveMakesAttentionsScoresAgainAndKeepsOtherProducts) {
  // Scores of 8 queries and keys over a head of 4, and what they choose of the values.
  std::string out = RunText(WithBlocks("  %3: f32[2,8,4] = aten.ones([2,8,4]) {fwd m1}\n"
                                       "  %4: f32[2,4,8] = aten.ones([2,4,8]) {fwd m1}\n"
                                       "  %5: f32[2,8,8] = aten.bmm(%3, %4) {fwd m1}\n"
                                       "  %6: f32[2,8,4] = aten.bmm(%5, %3) {fwd m1}\n"
                                       "  %7: f32[] = aten.sum(%6) {fwd m1}\n"
                                       "  output(%7) {fwd m1 name=\"loss\"}\n"
                                       "  %8: f32[2,8,4] = aten.bmm(%5, %6) {bwd m1}\n"
                                       "  %9: f32[4,8] = aten.mean(%8) {bwd m1}\n"
                                       "  grad(%0, %9) {bwd m1}\n"),
                            "recompute(mode=selective)");
  EXPECT_NE(out.find("  %10: f32[2,8,8] = aten.bmm(%8, %9) {bwd m1}\n"), std::string::npos) << out;
  EXPECT_EQ(out.find("f32[2,8,4] = aten.bmm(%10, %"), out.rfind("f32[2,8,4] = aten.bmm(%10, %")) << out;
  EXPECT_NE(out.find("aten.bmm(%10, %6) {bwd m1}\n"), std::string::npos) << out;
}

TEST(Recompute, WhatIsWrittenInPlaceIsKeptAndReadersOfWhatChangesRunOnce) {
  // %3 is written after it is made; %5 reads the buffer before it changes, %7 after.
  std::string out = RunText(WithBlocks("  %3: f32[4,8] = aten.tanh(%2) {fwd m1}\n"
                                       "  %4: f32[4,8] in %3+0 = aten.add_.Tensor(%3, %0) {fwd m1 writes=[%3]}\n"
                                       "  %5: f32[4,8] = aten.mul.Tensor(%1, %0) {fwd m1}\n"
                                       "  %6: f32[4,8] in %1+0 = aten.add_.Tensor(%1, %2) {fwd m1 writes=[%1]}\n"
                                       "  %7: f32[4,8] = aten.mul.Tensor(%1, %0) {fwd m1}\n"
                                       "  %8: f32[] = aten.sum(%7) {fwd m1}\n"
                                       "  output(%8) {fwd m1 name=\"loss\"}\n"
                                       "  %9: f32[4,8] = aten.mul.Tensor(%3, %5) {bwd m1}\n"
                                       "  %10: f32[4,8] = aten.mul.Tensor(%9, %7) {bwd m1}\n"
                                       "  grad(%0, %10) {bwd m1}\n"),
                            "recompute");
  EXPECT_EQ(MetaOf(out), "\"full: 1 ops run again; kept for backward 256 B instead of 384 B\"");
  EXPECT_NE(out.find("  %9: f32[4,8] = aten.mul.Tensor(%3, %5) {bwd m1}\n"
                     "  %10: f32[4,8] = aten.mul.Tensor(%1, %0) {bwd m1}\n"
                     "  %11: f32[4,8] = aten.mul.Tensor(%9, %10) {bwd m1}\n"),
            std::string::npos)
      << out;
}

TEST(Recompute, WhatLeavesABlockIsKept) {
  // Read by the forward part outside, returned, or read after the backward part.
  for (const char* leaves : {"  %5: f32[] = aten.sum(%3) {fwd m0}\n  output(%5) {fwd m0 name=\"loss\"}\n",
                             "  output(%3) {fwd m1 name=\"y\"}\n", "  assign(%1, %3) {fwd m1}\n"}) {
    std::string text = WithBlocks("  %3: f32[4,8] = aten.tanh(%2) {fwd m1}\n" + std::string(leaves) +
                                  "  %6: f32[4,8] = aten.mul.Tensor(%3, %2) {bwd m1}\n  grad(%0, %6) {bwd m1}\n");
    bool assigned = text.find("assign") != std::string::npos;  // within the block: only the buffer is changed by it
    EXPECT_EQ(RunText(text, "recompute").find("meta recompute") != std::string::npos, assigned) << text;
  }
}

// ---- memory ----

int64_t Peak(const std::string& text) {
  Result<Program> program = Parse(text);
  EXPECT_TRUE(program.ok()) << text;
  Result<PhaseLiveness> life = ComputeLiveness(*program, program->phases[0]);
  EXPECT_TRUE(life.ok());
  return life->peak_bytes;
}

TEST(Recompute, OneBlocksActivationsLiveAtATime) {
  for (const char* sharding : {"", ",shard(ranks=2),update"}) {
    std::vector<int64_t> plain, full;
    for (int n : {3, 4, 5, 6, 7}) {
      std::string text = Blocks(n).text();
      plain.push_back(Peak(RunText(text, "canonicalize" + std::string(sharding))));
      full.push_back(Peak(RunText(text, "canonicalize,recompute" + std::string(sharding))));
    }
    for (size_t i = 1; i < plain.size(); ++i) {
      // Kept of a block: without recomputation relu, scaled mask, tanh and what enters; with it what enters.
      EXPECT_EQ(plain[i] - plain[i - 1], 256 + 3 * 128);
      EXPECT_EQ(full[i] - full[i - 1], 128) << "the recomputed values of a block end with its backward part";
    }
    EXPECT_LT(full.back(), plain.back());
  }
}

TEST(Recompute, NoRecomputedValueOutlivesItsBlock) {
  Result<Program> program = Parse(RunText(Blocks(5).text(), "recompute"));
  ASSERT_TRUE(program.ok());
  const Phase& phase = program->phases[0];
  auto life = ComputeLiveness(*program, phase);
  ASSERT_TRUE(life.ok());
  auto block = [&](int32_t index) { return (program->op(phase.ops[index]).module - 1) / 3; };
  std::set<std::string> forward = {"aten.addmm", "aten.relu", "aten.div.Tensor", "aten.tanh"};
  int seen = 0;
  for (const StorageLife& s : life->storages) {
    const Op& op = program->op(phase.ops[s.first]);
    if (op.part != Part::kBackward || !forward.contains(op.name)) continue;
    ++seen;
    EXPECT_EQ(block(s.first), block(s.last)) << op.name;
  }
  EXPECT_EQ(seen, 5 * 4);
}

std::map<std::string, int> GathersByUnit(const std::string& text, const std::string& part) {
  std::map<std::string, int> out;
  for (size_t at = text.find("gather.start("); at != std::string::npos; at = text.find("gather.start(", at + 1)) {
    std::string line = text.substr(at, text.find('\n', at) - at);
    if (line.find("{" + part) == std::string::npos) continue;
    size_t units = line.find("units=[");
    ++out[line.substr(units, line.find(']', units) - units)];
  }
  return out;
}

TEST(Recompute, OneGatherServesRecomputationAndBackward) {
  std::string text = Blocks(3).text();
  std::string plain = RunText(text, "shard(ranks=2),update"), full = RunText(text, "recompute,shard(ranks=2),update");
  EXPECT_EQ(GathersByUnit(full, "fwd"), GathersByUnit(plain, "fwd"));
  auto before = GathersByUnit(plain, "bwd"), after = GathersByUnit(full, "bwd");
  for (auto& [unit, count] : before) EXPECT_EQ(count, 1) << unit;
  for (auto& [unit, count] : after) EXPECT_EQ(count, 1) << unit;
  // The first block's input needs no gradient, so its `up` was not gathered; biases are needed by the forward ops only.
  EXPECT_EQ(before.size(), 3u + 2u);
  EXPECT_EQ(after.size(), 3u * 3u);
}

TEST(Recompute, CastsOnShardsAreGatheredAgainInBothOrdersWithPrecision) {
  std::string text = GoldenInput("mixed.il");
  text.insert(text.find("param "), "module 0 \"\" \"Net\"\nmodule 1 \"h.0\" \"Block\"\n");
  text.replace(text.find("%13: bf16[2,8] = aten.addmm(%11, %3, %12)"), 41,  // the interpreter has no addmm
               "%50: bf16[2,8] = aten.mm(%3, %12) {fwd}\n  %13: bf16[2,8] = aten.add.Tensor(%50, %11)");
  // All but the sum and the output are a block.
  for (size_t at = text.find("{fwd}"); at < text.find("aten.sum(%15)"); at = text.find("{fwd}", at)) {
    text.replace(at, 5, "{fwd m1}");
  }
  std::string cast = "precision(param=bf16)", rest = ",shard(ranks=2),update";
  std::string plain = RunText(text, cast + rest);
  for (const std::string& first : {cast + ",recompute", "recompute," + cast}) {
    std::string out = RunText(text, first + rest);
    EXPECT_EQ(CountOf(out, "bf16[64] = gather.start("), 4) << out;
    EXPECT_EQ(CountOf(out, "f32[64] = gather.start("), 2) << out;
    Result<Program> a = Parse(plain), b = Parse(out);
    ASSERT_TRUE(a.ok() && b.ok()) << out;
    InterpretOptions run{.ranks = 2};
    Result<RunResult> expected = Interpret(*a, run), actual = Interpret(*b, run);
    ASSERT_TRUE(expected.ok() && actual.ok()) << (actual.ok() ? "" : actual.error().ToString());
    EXPECT_EQ(FirstDifference(*expected, *actual), "") << out;
  }
  // Casts that are gathered again are not among the kept bytes: 64 of %14 and 4 of the loss.
  EXPECT_EQ(RunText(text, cast + ",recompute(mode=budget,bytes=68)"), RunText(text, cast));
}

// ---- modes ----

TEST(Recompute, SelectiveKeepsTheExpensiveResults) {
  std::string text = RunText(Blocks(2).text(), "recompute(mode=selective)");
  std::string backward = text.substr(text.find("aten.ones_like"));
  EXPECT_EQ(CountOf(backward, "aten.addmm"), 0);
  EXPECT_EQ(CountOf(backward, "aten.relu"), 2);
  EXPECT_EQ(CountOf(backward, "aten.tanh("), 2);
  EXPECT_EQ(MetaOf(text), "\"selective: 10 ops run again; kept for backward 1.0 KiB instead of 1.3 KiB\"");
  text = RunText(Blocks(2).text(), "recompute(mode=selective,save=aten.relu+aten.tanh)");
  EXPECT_EQ(CountOf(text.substr(text.find("aten.ones_like")), "aten.bernoulli"), 2) << "the masks";
}

TEST(Recompute, SelectiveKeepsEverySecondProduct) {
  auto products = [](const std::string& pass) {
    const std::string text = RunText(Blocks(2).text(), pass);
    const std::string again = text.substr(text.find("aten.ones_like"));
    return std::pair(CountOf(again, "aten.addmm"), CountOf(again, "aten.mm("));
  };
  const auto [first, others] = products("recompute(mode=selective)");
  EXPECT_EQ(products("recompute(mode=selective,keep=second)"), std::pair(first, others + 2)) << "a block's second";
  EXPECT_EQ(MetaOf(RunText(Blocks(2).text(), "recompute(mode=selective,keep=all)")).substr(0, 9), "interlace")
      << "no scores, so nothing runs again";
}

TEST(Recompute, KeepAllMakesScoresAgainAndWhatIsMadeOfThem) {
  std::string out = RunText(WithBlocks("  %3: f32[2,8,4] = aten.ones([2,8,4]) {fwd m1}\n"
                                       "  %4: f32[2,4,8] = aten.ones([2,4,8]) {fwd m1}\n"
                                       "  %5: f32[2,8,8] = aten.bmm(%3, %4) {fwd m1}\n"
                                       "  %6: f32[2,8,8] = aten.exp(%5) {fwd m1}\n"
                                       "  %7: f32[2,8,4] = aten.bmm(%6, %3) {fwd m1}\n"
                                       "  %8: f32[2,8,4] = aten.relu(%7) {fwd m1}\n"
                                       "  %9: f32[] = aten.sum(%8) {fwd m1}\n"
                                       "  output(%9) {fwd m1 name=\"loss\"}\n"
                                       "  %10: f32[2,8,4] = aten.bmm(%6, %8) {bwd m1}\n"
                                       "  %11: f32[4,8] = aten.mean(%10) {bwd m1}\n"
                                       "  grad(%0, %11) {bwd m1}\n"),
                            "recompute(mode=selective,keep=all)");
  EXPECT_EQ(CountOf(out, "aten.exp("), 2) << out;
  EXPECT_EQ(CountOf(out, "f32[2,8,8] = aten.bmm("), 2) << out;
  EXPECT_EQ(CountOf(out, "aten.relu("), 1) << out;
  EXPECT_EQ(CountOf(out, "aten.ones("), 2) << out;
}

TEST(Recompute, SelectiveWithWholeBlocks) {
  std::string text = RunText(Blocks(3).text(), "recompute(mode=selective,whole=blocks.1)");
  std::string backward = text.substr(text.find("aten.ones_like"));
  EXPECT_EQ(CountOf(backward, "aten.addmm"), 1);
  EXPECT_EQ(CountOf(backward, "aten.relu"), 3);
  std::string all = RunText(Blocks(2).text(), "recompute(mode=selective,whole=blocks.0+blocks.1)");
  std::string full = RunText(Blocks(2).text(), "recompute(mode=full)");
  EXPECT_EQ(all.substr(all.find("phase")), full.substr(full.find("phase")));
}

TEST(Recompute, BudgetDropsTheCheapestBytesFirstAndNoMoreThanItMust) {
  // Saved: %3 (expensive), %4 and %5 (one cheap op each, %5 of twice the bytes), %6 from %3 too.
  std::string text =
      "interlace 1 captured\nstep 1 reduce_each\ngroup 0 adamw\nmodule 0 \"\" \"Net\"\nmodule 1 \"h.0\" \"Block\"\n"
      "param %0: f32[512,512] \"w\" trainable group 0\ninput %1: f32[512,512] \"x\"\n"
      "phase micro_batch takes () gives () {\n"
      "  %2: f32[512,512] = aten.mm(%1, %0) {fwd m1}\n"
      "  %3: f32[512,512] = aten.relu(%2) {fwd m1}\n"
      "  %4: f32[512,512] = aten.tanh(%3) {fwd m1}\n"
      "  %5: f32[] = aten.sum(%4) {fwd m1}\n"
      "  output(%5) {fwd m1 name=\"loss\"}\n"
      "  %6: f32[512,512] = aten.mul.Tensor(%4, %3) {bwd m1}\n"
      "  %7: f32[512,512] = aten.mul.Tensor(%6, %2) {bwd m1}\n"
      "  grad(%0, %7) {bwd m1}\n}\n";
  auto meta = [&](const std::string& bytes) {
    return MetaOf(RunText(text, "recompute(mode=budget,bytes=" + bytes + ")"));
  };
  EXPECT_EQ(RunText(text, "recompute(mode=budget,bytes=3MiB)"), RunText(text, "")) << "it fits as it is";
  EXPECT_EQ(meta("2999999"), "\"budget: 1 ops run again; kept for backward 2.0 MiB instead of 3.0 MiB\"");
  EXPECT_EQ(meta("2MiB"), "\"budget: 1 ops run again; kept for backward 2.0 MiB instead of 3.0 MiB\"");
  EXPECT_EQ(meta("1MiB"), "\"budget: 2 ops run again; kept for backward 1.0 MiB instead of 3.0 MiB\"");
  EXPECT_EQ(CountOf(RunText(text, "recompute(mode=budget,bytes=1MiB)"), "aten.mm("), 1) << "the product comes last";
  EXPECT_EQ(meta("1"), "\"budget: 3 ops run again; kept for backward 0 B instead of 3.0 MiB\"");
}

TEST(Recompute, BudgetIsMetOrTheLeastIsSaid) {
  std::string text = Blocks(3).text();
  // Two values that enter the next block, the last value and the loss: 128 each, and 4.
  EXPECT_EQ(
      RunText(text, "recompute(mode=budget,bytes=387)"),
      "error: pass 'recompute': bytes=387: at least 388 bytes (388 B of 1.9 KiB) are kept for the backward part: what "
      "enters a block and what lies outside of blocks; raise bytes or name larger blocks");
  for (int64_t bytes = 388; bytes < 2000; bytes += 50) {
    std::string out = RunText(text, "recompute(mode=budget,bytes=" + std::to_string(bytes) + ")");
    ASSERT_FALSE(out.starts_with("error")) << out;
  }
  EXPECT_EQ(MetaOf(RunText(text, "recompute")),
            "\"full: 21 ops run again; kept for backward 388 B instead of 1.9 KiB\"");
  EXPECT_EQ(MetaOf(RunText(text, "recompute(mode=budget,bytes=772)")),
            "\"budget: 15 ops run again; kept for backward 772 B instead of 1.9 KiB\"");
}

// ---- errors ----

TEST(Recompute, BadInputIsExplained) {
  std::string text = Blocks(3).text(), pass = "error: pass 'recompute': ";
  EXPECT_EQ(RunText(text, "shard(ranks=2),recompute"),
            pass +
                "the program has units already (shard, replicate or zero1 has run); "
                "recompute takes a captured one");
  EXPECT_EQ(RunText(text, "recompute,recompute(mode=selective)"),
            pass +
                "the program has been through recompute already (full: 21 ops run again; kept for backward 388 B "
                "instead of 1.9 KiB); run it once, with one mode");
  EXPECT_EQ(RunText(text, "recompute(blocks=block)"), pass + "option blocks: no module 'block'");
  EXPECT_EQ(RunText(text, "recompute(blocks=blocks.1+bloks.0)"),
            pass + "option blocks: no module 'bloks.0', did you mean 'blocks.0'?");
  EXPECT_EQ(RunText(text, "recompute(blocks=blocks.1+blocks.1.up)"),
            pass + "option blocks: 'blocks.1.up' lies within 'blocks.1'; blocks must not overlap");
  EXPECT_EQ(RunText(text, "recompute(mode=selective,save=aten.rellu)"),
            pass + "option save: the forward part has no op 'aten.rellu', did you mean 'aten.relu'?");
  EXPECT_EQ(RunText(text, "recompute(save=aten.relu)"),
            pass + "option save needs mode=selective; mode=full does not read it");
  EXPECT_EQ(RunText(text, "recompute(mode=selective,whole=blocks.9)"),
            pass + "option whole: no block 'blocks.9', did you mean 'blocks.0'?");
  EXPECT_EQ(RunText(text, "recompute(whole=blocks.1)"),
            pass + "option whole needs mode=selective; mode=full does not read it");
  EXPECT_EQ(RunText(text, "recompute(keep=second)"),
            pass + "option keep needs mode=selective; mode=full does not read it");
  EXPECT_EQ(RunText(text, "recompute(mode=selective,save=aten.relu,keep=all)"),
            pass + "option save says what is kept; keep=all does, too");
  EXPECT_EQ(RunText(text, "recompute(bytes=10)"), pass + "option bytes needs mode=budget; mode=full does not read it");
  EXPECT_EQ(RunText(text, "recompute(mode=budget)"),
            pass + "mode=budget needs bytes=N: what may be kept for the backward part");
  std::string cluster = RunText(text, "recompute(mode=budget,bytes=800,cluster=locl-1)");
  EXPECT_NE(cluster.find("did you mean"), std::string::npos) << cluster;
  EXPECT_EQ(
      RunText(GoldenInput("mlp.il"), "recompute"),
      pass + "the model has no list of modules whose elements could be blocks; name them: blocks=encoder+decoder");
}

TEST(Recompute, SymbolicSizesAreLeftOpenExceptForABudget) {
  std::string text = WithBlocks(
      "  %3: f32[b,8] = aten.tanh(%4) {fwd m1}\n  %5: f32[] = aten.sum(%3) {fwd m1}\n"
      "  output(%5) {fwd m1 name=\"loss\"}\n  %6: f32[4,8] = aten.mul.Tensor(%3, %3) {bwd m1}\n  grad(%0, %6) {bwd "
      "m1}\n");
  text.replace(text.find("input %2"), 0, "input %4: f32[b,8] \"s\"\n");
  text.replace(text.find("group 0"), 0, "symbol b 1 8\n");
  EXPECT_EQ(MetaOf(RunText(text, "recompute")), "\"full: 1 ops run again\"");
  EXPECT_EQ(RunText(text, "recompute(mode=budget,bytes=10)"),
            "error: pass 'recompute': mode=budget needs sizes that are numbers; bind the symbols first");
}

TEST(Recompute, CanonicalizeAfterwardsLeavesTheOpsThatRunAgain) {
  std::string once = RunText(Blocks(3).text(), "canonicalize,recompute");
  EXPECT_EQ(RunText(once, "canonicalize"), once);
}

}  // namespace
}  // namespace interlace
