// What shard, replicate, zero1, accumulate and update say about programs they cannot take, and the places where
// gradients need more than being placed. Whole texts are in golden_test.cc, bits in property_test.cc.
#include "ir/testing/interpreter.h"
#include "passes/pass_test_support.h"

namespace interlace {
namespace {

std::string With(const std::string& declarations, const std::string& ops) {
  return "interlace 1 captured\nstep 1 reduce_each\ngroup 0 adamw\n" + declarations +
         "phase micro_batch takes () gives () {\n" + ops + "}\n";
}

int Count(const std::string& text, const std::string& what) {
  int count = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++count;
  return count;
}

// Runs the pipeline and checks that the interpreter gives the bits of the captured program.
std::string CheckedRun(const std::string& text, const std::string& pipeline, int64_t ranks) {
  std::string out = RunText(text, pipeline + ",update");
  Result<Program> captured = Parse(text), program = Parse(out);
  EXPECT_TRUE(captured.ok() && program.ok()) << out;
  if (!captured.ok() || !program.ok()) return out;
  testing::InterpretOptions options;
  options.ranks = ranks;
  Result<testing::RunResult> expected = testing::Interpret(*captured, options),
                             actual = testing::Interpret(*program, options);
  EXPECT_TRUE(expected.ok() && actual.ok()) << (actual.ok() ? "" : actual.error().ToString());
  if (!expected.ok() || !actual.ok()) return out;
  EXPECT_EQ(testing::FirstDifference(*expected, *actual), "") << out;
  return out;
}

TEST(Sharding, OrderOfPassesIsExplained) {
  std::string text = GoldenInput("mlp.il");
  EXPECT_EQ(RunText(text, "update"),
            "error: pass 'update': the program has no units; run shard, replicate or zero1 before update");
  EXPECT_EQ(RunText(text, "accumulate(steps=2)"),
            "error: pass 'accumulate': the program has no units; run shard, replicate or zero1 before accumulate");
  for (std::string pass : {"bucket(modules=layers)", "prefetch", "unshard", "reorder", "overlap_update"}) {
    const std::string name = pass.substr(0, pass.find('('));
    EXPECT_EQ(RunText(text, "canonicalize," + pass),
              "error: pass '" + name + "': the program has no units; run shard, replicate or zero1 before " + name);
  }
  EXPECT_EQ(RunText(text, "shard(ranks=2),zero1(ranks=2)"),
            "error: pass 'zero1': the program has units already (shard, replicate or zero1 has run); "
            "zero1 takes a captured one");
  EXPECT_EQ(RunText(text, "shard(ranks=2),accumulate(steps=2),accumulate(steps=2)"),
            "error: pass 'accumulate': the program accumulates 2 micro-batches already; run accumulate once");
  EXPECT_EQ(
      RunText(text, "shard(ranks=2),update,accumulate(steps=2)"),
      "error: pass 'accumulate': run accumulate before update, whose mean depends on the number of micro-batches");
  EXPECT_EQ(RunText(text, "shard(ranks=2),update,update"),
            "error: pass 'update': the program has an update phase already");
}

TEST(Sharding, ParametersThatCannotBeCutAreNamed) {
  EXPECT_EQ(
      RunText(With("param %0: f32[4]{2} \"w\" trainable group 0\n", ""), "shard(ranks=2)"),
      "error: pass 'shard': parameter 'w' is f32[4]{2}, which leaves gaps or overlaps in memory; make it contiguous");
  EXPECT_EQ(RunText(With("symbol b 2 8\nparam %0: f32[b] \"w\" trainable group 0\n", ""), "shard(ranks=2)"),
            "error: pass 'shard': parameter 'w' is f32[b]; sizes must be numbers, bind them first");
  EXPECT_EQ(RunText(With("param %0: i64[4] \"w\" trainable group 0\n", ""), "shard(ranks=2)"),
            "error: pass 'shard': parameter 'w' is trainable but i64 is no floating type");
  EXPECT_EQ(
      RunText(With("param %0: f32[4] \"w\" frozen\n", "  %1: f32[4] in %0+0 = aten.relu_(%0) {fwd writes=[%0]}\n"),
              "shard(ranks=2)"),
      "error: pass 'shard': parameter 'w' is changed in place by the model; only buffers may be");
}

TEST(Sharding, ParametersWithoutAGroupAreNamed) {
  std::string text = With("param %0: f32[4] \"w\" trainable\ninput %1: f32[4] \"x\"\n",
                          "  %2: f32[4] = aten.tanh(%1) {bwd}\n  grad(%0, %2) {bwd}\n");
  EXPECT_EQ(RunText(text, "shard(ranks=2),update"),
            "error: pass 'update': parameter 'w' is trainable but in no optimizer group; give it to the optimizer or "
            "freeze it");
}

TEST(Sharding, UnknownOptimizerGetsAHint) {
  std::string text = With("param %0: f32[4] \"w\" trainable group 0\n", "");
  text.replace(text.find("adamw"), 5, "adamv");
  EXPECT_NE(RunText(text, "shard(ranks=2),update").find("did you mean 'adamw'?"), std::string::npos)
      << RunText(text, "shard(ranks=2),update");
}

constexpr const char* kPair =
    "param %0: f32[3,40] \"a\" trainable group 0\nparam %1: f32[3,40] \"b\" trainable group 0\ninput %2: f32[3,40] "
    "\"x\"\n";

TEST(Sharding, OneValueAsGradientOfTwoParametersIsCopiedOnce) {
  std::string text = With(kPair,
                          "  %3: f32[3,40] = aten.add.Tensor(%0, %1) {fwd}\n"
                          "  %4: f32[3,40] = aten.mul.Tensor(%3, %2) {fwd}\n"
                          "  %5: f32[] = aten.sum(%4) {fwd}\n"
                          "  output(%5) {fwd name=\"loss\"}\n"
                          "  %6: f32[3,40] = aten.mul.Tensor(%2, 2.0) {bwd}\n"
                          "  grad(%0, %6) {bwd}\n"
                          "  grad(%1, %6) {bwd}\n");
  for (const char* pipeline : {"shard(ranks=2)", "shard(ranks=2,wait=now)", "replicate(ranks=2)"}) {
    std::string out = CheckedRun(text, pipeline, 2);
    EXPECT_EQ(Count(out, "= copy("), 1) << out;
  }
  EXPECT_EQ(Count(CheckedRun(text, "shard(ranks=1)", 1), "= copy("), 1);
}

TEST(Sharding, TransposedInputAndParameterGradientsAreCopied) {
  std::string text = With(
      "param %0: f32[3,40] \"a\" trainable group 0\nparam %1: f32[40,3] \"b\" trainable group 0\n"
      "input %2: f32[3,40] \"x\"\n",
      "  %3: f32[3,40] = aten.mul.Tensor(%0, %2) {fwd}\n"
      "  %4: f32[] = aten.sum(%3) {fwd}\n"
      "  output(%4) {fwd name=\"loss\"}\n"
      "  grad(%0, %0) {bwd}\n"
      "  %5: f32[3,40] = aten.tanh(%2) {bwd}\n"
      "  %6: f32[40,3]{1,40} in %5+0 = aten.t(%5) {bwd}\n"
      "  grad(%1, %6) {bwd}\n");
  for (int64_t ranks : {1, 2, 3}) {
    for (const char* pass : {"shard", "zero1", "replicate"}) {
      std::string out =
          CheckedRun(text, std::string("canonicalize,") + pass + "(ranks=" + std::to_string(ranks) + ")", ranks);
      EXPECT_EQ(Count(out, "= copy("), 2) << out;
    }
  }
}

TEST(Sharding, AGradientUsedLaterKeepsItsBufferUntilThen) {
  std::string text = With(kPair,
                          "  %3: f32[3,40] = aten.mul.Tensor(%0, %1) {fwd}\n"
                          "  %4: f32[] = aten.sum(%3) {fwd}\n"
                          "  output(%4) {fwd name=\"loss\"}\n"
                          "  %5: f32[3,40] = aten.tanh(%2) {bwd}\n"
                          "  grad(%0, %5) {bwd}\n"
                          "  %6: f32[3,40] = aten.mul.Tensor(%2, 3.0) {bwd}\n"
                          "  grad(%1, %6) {bwd}\n"
                          "  %7: f32[] = aten.sum(%5) {bwd}\n"
                          "  output(%7) {bwd name=\"late\"}\n");
  for (const char* pipeline : {"shard(ranks=2,wait=now)", "zero1(ranks=2)"}) {
    std::string out = CheckedRun(text, pipeline, 2);
    EXPECT_EQ(Count(out, "= copy("), 0) << out;
    EXPECT_LT(out.find("aten.sum(%", out.find("aten.tanh")), out.rfind("release(")) << out;
  }
}

TEST(Sharding, ReplicateHoldsEightMiBOfReductionsUnderWay) {
  std::string declarations = "input %0: f32[786432] \"x\"\n", ops;  // 3 MiB each
  for (int i = 1; i <= 4; ++i) {
    const std::string n = std::to_string(i), of = std::to_string(i + 4);
    declarations += "param %" + n + ": f32[786432] \"p" + n + ".weight\" trainable group 0\n";
    ops +=
        "  %" + of + ": f32[786432] = aten.mul.Tensor(%0, " + n + ".0) {bwd}\n  grad(%" + n + ", %" + of + ") {bwd}\n";
  }
  const auto order = [&](const std::string& pass) {  // s: a reduction starts, w: one is waited for
    const std::string out = RunText(With(declarations, ops), pass);
    std::string found;
    for (size_t at = out.find("reduce."); at != std::string::npos; at = out.find("reduce.", at + 1)) {
      found += out.compare(at, 12, "reduce.start") == 0 ? 's' : 'w';
    }
    return found;
  };
  EXPECT_EQ(order("replicate(ranks=2)"), "sswswsww");
  EXPECT_EQ(order("shard(ranks=2)"), "swswswsw");
}

TEST(Sharding, AGradientWrittenInPlaceIsCopiedAsItWasAtItsMarker) {
  std::string text = With("param %0: f32[40] \"a\" trainable group 0\ninput %1: f32[40] \"x\"\n",
                          "  %2: f32[40] = aten.tanh(%1) {bwd}\n"
                          "  %3: f32[40] in %2+0 = aten.add_.Tensor(%2, %1) {bwd writes=[%2]}\n"
                          "  grad(%0, %2) {bwd}\n"
                          "  %4: f32[40] in %2+0 = aten.add_.Tensor(%3, %1) {bwd writes=[%3]}\n"
                          "  %5: f32[] = aten.sum(%4) {bwd}\n"
                          "  output(%5) {bwd name=\"after\"}\n");
  for (const char* pipeline : {"shard(ranks=2)", "canonicalize,replicate(ranks=2,wait=now)", "zero1(ranks=2)"}) {
    EXPECT_EQ(Count(CheckedRun(text, pipeline, 2), "= copy("), 1) << pipeline;
  }
  CheckedRun(text, "shard(ranks=1)", 1);
}

TEST(Sharding, PartsOfAParameterAreViewedInEachStretch) {
  std::string text = With("param %0: f32[4,40] \"a\" trainable group 0\ninput %1: f32[40] \"x\"\n",
                          "  %2: f32[40] in %0+80 = aten.select.int(%0, 0, 2) {fwd}\n"
                          "  %3: f32[40] = aten.mul.Tensor(%2, %1) {fwd}\n"
                          "  %4: f32[] = aten.sum(%3) {fwd}\n"
                          "  output(%4) {fwd name=\"loss\"}\n"
                          "  %5: f32[40] = aten.mul.Tensor(%2, %1) {bwd}\n"
                          "  %6: f32[4,40]{0,1} in %5+0 = aten.expand(%5, [4, 40]) {bwd}\n"
                          "  grad(%0, %6) {bwd}\n");
  for (const char* pipeline : {"shard(ranks=3)", "canonicalize,shard(ranks=3,ahead=0)", "replicate(ranks=3)"}) {
    std::string out = CheckedRun(text, pipeline, 3);
    EXPECT_EQ(Count(out, "+80 = "), std::string(pipeline).find("shard") != std::string::npos ? 2 : 1) << out;
  }
}

TEST(Sharding, AGradientThatIsAnOutputIsCopied) {
  std::string text = With("param %0: f32[40] \"a\" trainable group 0\ninput %1: f32[40] \"x\"\n",
                          "  %2: f32[40] = aten.tanh(%1) {bwd}\n"
                          "  grad(%0, %2) {bwd}\n"
                          "  output(%2) {bwd name=\"g\"}\n");
  EXPECT_EQ(Count(CheckedRun(text, "shard(ranks=2)", 2), "= copy("), 1);
}

TEST(Sharding, AParameterThatIsAnOutputLeavesTheGatheredBuffer) {
  std::string text = With("param %0: f32[40] \"a\" frozen\n", "  output(%0) {fwd name=\"a\"}\n");
  std::string out = CheckedRun(text, "shard(ranks=2)", 2);
  EXPECT_EQ(Count(out, "= copy("), 1) << out;
  EXPECT_EQ(Count(out, "release("), 1) << out;
}

TEST(Sharding, GathersStartAheadButNotAcrossForwardAndBackward) {
  std::string text =
      With("param %0: f32[32] \"a\" frozen\nparam %1: f32[32] \"b\" frozen\nparam %2: f32[32] \"c\" frozen\n",
           "  %3: f32[32] = aten.tanh(%0) {fwd}\n"
           "  %4: f32[32] = aten.mul.Tensor(%3, %1) {fwd}\n"
           "  %5: f32[32] = aten.mul.Tensor(%4, %2) {fwd}\n"
           "  %6: f32[32] = aten.mul.Tensor(%5, %2) {bwd}\n"
           "  %7: f32[32] = aten.mul.Tensor(%6, %1) {bwd}\n"
           "  output(%7) {bwd name=\"y\"}\n");
  auto order = [&](const std::string& pipeline) {  // s: start, w: wait, r: release, o: op; | between the parts
    std::string out, phases = Phases(RunText(text, pipeline));
    bool backward = false;
    for (size_t at = 0; at < phases.size(); at = phases.find('\n', at) + 1) {
      std::string line = phases.substr(at, phases.find('\n', at) - at);
      if (line.find("{bwd") != std::string::npos && !backward) backward = true, out += "|";
      if (line.find("gather.start") != std::string::npos) out += "s";
      if (line.find("gather.wait") != std::string::npos) out += "w";
      if (line.find("release") != std::string::npos) out += "r";
      if (line.find("aten.") != std::string::npos) out += "o";
    }
    return out;
  };
  EXPECT_EQ(order("shard(ranks=2,ahead=0)"), "sworsworswor|sworswor");
  EXPECT_EQ(order("shard(ranks=2)"),
            "sswor"
            "swor"
            "wor|sswor"
            "wor");
  EXPECT_EQ(order("shard(ranks=2,ahead=9)"),
            "ssswor"
            "wor"
            "wor|sswor"
            "wor");
}

TEST(Sharding, AnAxisOfAnotherSizeIsRefused) {
  std::string text = With("mesh dp 4\nparam %0: f32[4] \"w\" frozen\n", "");
  EXPECT_EQ(RunText(text, "shard(ranks=2)"), "error: pass 'shard': axis dp has 4 ranks in the program's mesh, not 2");
  EXPECT_EQ(Count(RunText(text, "shard(ranks=4)"), "mesh dp 4\n"), 1);
}

TEST(Sharding, EmptyAndScalarParametersHaveUnits) {
  std::string text = With(
      "param %0: f32[] \"scale\" trainable group 0\nparam %1: f32[0,3] \"none\" trainable group 0\ninput %2: f32[] "
      "\"x\"\n",
      "  %3: f32[] = aten.mul.Tensor(%0, %2) {fwd}\n"
      "  output(%3) {fwd name=\"loss\"}\n"
      "  %4: f32[] = aten.mul.Tensor(%2, 2.0) {bwd}\n"
      "  grad(%0, %4) {bwd}\n");
  for (const char* pass : {"shard", "zero1", "replicate"}) {
    std::string out = CheckedRun(text, std::string(pass) + "(ranks=3)", 3);
    EXPECT_EQ(Count(out, "numel 96 shard 32"), 2) << out;
  }
}

TEST(Accumulate, OneStepChangesNothingButTheMode) {
  std::string text = GoldenInput("mlp.il");
  EXPECT_EQ(RunText(text, "shard(ranks=2),accumulate(steps=1)"), RunText(text, "shard(ranks=2)"));
  EXPECT_NE(RunText(text, "shard(ranks=2),accumulate(steps=1,mode=reduce_last)").find("step 1 reduce_last\n"),
            std::string::npos);
}

TEST(Accumulate, TwoStepsHaveNoMiddle) {
  std::string out = RunText(GoldenInput("mlp.il"), "shard(ranks=2),accumulate(steps=2)");
  EXPECT_EQ(Count(out, "phase micro_batch."), 2);
  EXPECT_EQ(Count(RunText(GoldenInput("mlp.il"), "shard(ranks=2),accumulate(steps=5)"), "phase micro_batch."), 3);
}

TEST(Update, ProgramsWithOpenSymbolsStaySharded) {
  std::string text = With("symbol b 2 8\nparam %0: f32[4] \"w\" frozen\ninput %1: f32[b] \"x\"\n", "");
  EXPECT_TRUE(RunText(text, "shard(ranks=2),update").starts_with("interlace 1 sharded\n"));
  EXPECT_TRUE(RunText(GoldenInput("mlp.il"), "shard(ranks=2),update").starts_with("interlace 1 scheduled\n"));
}

}  // namespace
}  // namespace interlace
