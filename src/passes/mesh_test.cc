#include <gtest/gtest.h>

#include "base/testing/rounds.h"
#include "ir/testing/interpreter.h"
#include "ir/testing/random_program.h"
#include "passes/inspect.h"
#include "passes/pass_test_support.h"
#include "passes/search.h"

namespace interlace {
namespace {

TEST(Mesh, HybridShardingOfAnMlp) {
  ExpectGolden("mlp.hybrid.il", RunText(GoldenInput("mlp.il"),
                                        "canonicalize,mesh(axes=replica:2+dp:2),shard(axis=dp,replicas=replica),"
                                        "update(clip=1.0)"));
}

// The same, and each replica makes the step of a part of the shard.
TEST(Mesh, HybridShardingWithStatesOverReplicasOfAnMlp) {
  ExpectGolden("mlp.hybrid_states.il",
               RunText(GoldenInput("mlp.il"),
                       "canonicalize,mesh(axes=replica:2+dp:2),shard(axis=dp,replicas=replica,states=all),"
                       "update(clip=1.0),reposition_update"));
  Program program = std::move(*Parse(GoldenInput("mlp.il"), "test"));
  ASSERT_EQ(ErrorOf(Apply(program, "canonicalize,mesh(axes=replica:2+dp:2),shard(replicas=replica,states=all),update")),
            "no error");
  EXPECT_EQ(Summarize(program).gathered_bytes, (5 * 64 + 3 * 32) * 4) << "five gathers within dp, three of parts";
}

// The parts that replicas gather hide in the next step: a search that may leave them to it is faster, with the same
// bits.
TEST(Mesh, SearchesMayGatherPartsInTheNextStep) {
  int faster = 0;
  for (uint64_t seed = 1, last = Rounds(4); seed <= last; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    testing::RandomProgramOptions options;
    options.seed = seed;
    options.layers = 4;
    options.max_width = 40;
    testing::InterpretOptions run;
    run.ranks = 4;
    run.replicas = 2;
    run.accumulation = 1 + static_cast<int64_t>(seed % 2);
    run.clip = 0.5;
    const Program captured = testing::RandomProgram(options);
    const Result<testing::RunResult> expected = testing::Interpret(captured, run);
    ASSERT_TRUE(expected.ok()) << ErrorOf(expected);
    const auto searched = [&](const std::string& more) {
      Program program = captured.Clone();
      EXPECT_EQ(
          ErrorOf(Apply(program,
                        "canonicalize,mesh(axes=replica:2+dp:2),shard(replicas=replica,states=auto),accumulate(steps=" +
                            std::to_string(run.accumulation) +
                            "),update(clip=0.5),search(cluster=local-4,evaluations=60" + more + ")")),
          "no error");
      return program;
    };
    const Program within = searched(""), next = searched(",reposition=auto");
    const Result<testing::RunResult> actual = testing::Interpret(next, run);
    ASSERT_TRUE(actual.ok()) << ErrorOf(actual);
    EXPECT_EQ(testing::FirstDifference(*expected, *actual), "") << Print(next);
    const auto time_of = [](const Program& program) {
      const std::string& chosen = *program.Meta("search.chosen");
      return std::stoll(chosen.substr(chosen.find('|') + 1));
    };
    EXPECT_LE(time_of(next), time_of(within));
    faster += time_of(next) < time_of(within);
  }
  EXPECT_GT(faster, 0);
}

// Optimizer states over all ranks of both axes: gathers and reductions go along the two of them.
TEST(Mesh, Zero1OverAllRanksOfAnMlp) {
  ExpectGolden("mlp.zero1_mesh.il",
               RunText(GoldenInput("mlp.il"), "canonicalize,mesh(axes=replica:2+dp:2),zero1(axis=replica+dp),update"));
}

TEST(Mesh, WhatIsWrongIsSaid) {
  const std::string text = GoldenInput("mlp.il");
  EXPECT_EQ(RunText(text, "mesh(axes=dp)"),
            "error: pass 'mesh': option axes: 'dp' is no axis; write NAME:RANKS, such as replica:2+dp:4");
  EXPECT_EQ(RunText(text, "mesh(axes=dp:2+dp:2)"), "error: pass 'mesh': option axes: 'dp' is named twice");
  EXPECT_EQ(RunText(text, "mesh(axes=dp:2),mesh(axes=dp:3)"),
            "error: pass 'mesh': the program has a mesh already; declare it once, before shard");
  EXPECT_EQ(RunText(text, "mesh(axes=replica:2+dp:2),shard(axis=dq)"),
            "error: pass 'shard': the mesh has no axis 'dq', did you mean 'dp'?");
  EXPECT_EQ(RunText(text, "shard(ranks=2,replicas=replica)"),
            "error: pass 'shard': the mesh has no axis 'dp'; declare it first: mesh(axes=replica:2+dp:2)");
  EXPECT_EQ(RunText(text, "mesh(axes=replica:2+dp:2),shard(ranks=4)"),
            "error: pass 'shard': axis dp has 2 ranks in the program's mesh, not 4");
  EXPECT_EQ(RunText(text, "shard"), "error: pass 'shard': option 'ranks' is required: give ranks=N");
  EXPECT_EQ(RunText(text, "mesh(axes=dp:2+tp:2+replica:2),shard(replicas=dp+replica)"),
            "error: pass 'shard': axes written together must follow one another in the mesh, and dp,replica do not");
  const std::string parts =
      "error: pass 'shard': option states: not every replica can have a part of a shard's states: ";
  EXPECT_EQ(RunText(text, "mesh(axes=dp:2+replica:2),shard(replicas=replica,states=all)"),
            parts + "axis does not come right behind replicas in the mesh");
  EXPECT_EQ(RunText(text, "shard(ranks=2,states=all)"), parts + "there is one rank along axis or replicas");
  EXPECT_EQ(RunText(text, "mesh(axes=dp:2+replica:2),shard(replicas=replica,states=auto)"),
            RunText(text, "mesh(axes=dp:2+replica:2),shard(replicas=replica)"));
}

}  // namespace
}  // namespace interlace
