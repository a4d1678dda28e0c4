#include <gtest/gtest.h>

#include "passes/pass_test_support.h"

namespace interlace {
namespace {

TEST(Mesh, HybridShardingOfAnMlp) {
  ExpectGolden("mlp.hybrid.il", RunText(GoldenInput("mlp.il"),
                                        "canonicalize,mesh(axes=replica:2+dp:2),shard(axis=dp,replicas=replica),"
                                        "update(clip=1.0)"));
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
}

}  // namespace
}  // namespace interlace
