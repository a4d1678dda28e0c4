// Whole texts of one small model before and after each pass, and through the pipelines that people use; the files are
// read in review. (precision and recompute have tests of their own with whole texts.)
#include "passes/pass_test_support.h"

namespace interlace {
namespace {

struct Golden {
  const char* file;
  const char* pipeline;
};

class PassGolden : public ::testing::TestWithParam<Golden> {};

TEST_P(PassGolden, TextIsAsReviewed) {
  ExpectGolden(GetParam().file, RunText(GoldenInput("mlp.il"), GetParam().pipeline));
}

INSTANTIATE_TEST_SUITE_P(
    Files, PassGolden,
    ::testing::Values(
        Golden{"mlp.canonicalize.il", "canonicalize"}, Golden{"mlp.shard1.il", "canonicalize,shard(ranks=1),update"},
        Golden{"mlp.shard2.il", "canonicalize,shard(ranks=2),update(clip=1.0)"},
        Golden{"mlp.host2.il", "canonicalize,shard(ranks=2),update(clip=1.0),host_update(units=u0+u2)"},
        Golden{"mlp.host2_pending.il", "canonicalize,shard(ranks=2),update(clip=1.0),reposition_update,host_update"},
        Golden{"mlp.shard2_forward.il",
               "canonicalize,shard(ranks=2),update(clip=1.0),forward_only(out=u0.exp_avg+u2.exp_avg_sq+u0.shard)"},
        Golden{"mlp.shard2_plain.il", "canonicalize,shard(ranks=2,ahead=0,wait=now),update(norm=always)"},
        Golden{"mlp.replicate2.il", "canonicalize,replicate(ranks=2),update(clip=0.5)"},
        Golden{"mlp.zero1.il", "canonicalize,zero1(ranks=3),update(clip=0.5,momentum=false)"},
        Golden{"mlp.shard2_each.il", "canonicalize,shard(ranks=2),accumulate(steps=3),update"},
        Golden{"mlp.shard2_last.il", "canonicalize,shard(ranks=2),accumulate(steps=2,mode=reduce_last),update"},
        Golden{"mlp.shard1_last.il", "canonicalize,shard(ranks=1),accumulate(steps=2,mode=reduce_last),update"},
        Golden{"mlp.replicate2_each.il", "canonicalize,replicate(ranks=2),accumulate(steps=2),update"},
        Golden{"mlp.bucket.il", "canonicalize,shard(ranks=2),update,bucket(modules=*)"},
        Golden{"mlp.bucket_greedy.il", "canonicalize,shard(ranks=2),update,bucket(mode=greedy)"},
        Golden{"mlp.bucket_copy.il", "canonicalize,shard(ranks=2),update,bucket(modules=*,pack=copy)"},
        Golden{"mlp.prefetch.il", "canonicalize,shard(ranks=2),update,prefetch"},
        Golden{"mlp.unshard.il", "canonicalize,shard(ranks=2),accumulate(steps=2),update,unshard(units=all)"},
        Golden{"mlp.reorder.il", "canonicalize,shard(ranks=2),update,reorder"},
        Golden{
            "mlp.schedule.il",
            "canonicalize,shard(ranks=2),update,schedule(keep=u2,forward=u0+u1:1;u4:head,backward=u2,reduce=u2+u0:1)"},
        Golden{"mlp.overlap_update.il", "canonicalize,shard(ranks=2),update,overlap_update"},
        Golden{"mlp.transient_gradients.il", "canonicalize,shard(ranks=1),update(clip=1.0),transient_gradients"},
        Golden{"mlp.reposition_update.il", "canonicalize,zero1(ranks=2),update(clip=1.0),reposition_update"},
        Golden{"mlp.offload.il", "canonicalize,shard(ranks=2),update,overlap_update,offload(limit=1600)"},
        Golden{"mlp.offload_deepcompile.il",
               "canonicalize,shard(ranks=1),update,offload_deepcompile(limit=2700,fragment=1B)"},
        Golden{"mlp.offload_sync.il", "canonicalize,shard(ranks=2),update,offload_sync(kinds=states)"},
        Golden{
            "mlp.breadth_first.il",
            "canonicalize,breadth_first(micro_batches=2),shard(ranks=2),accumulate(steps=4,mode=reduce_last),update"},
        Golden{"mlp.stage0.il",
               "canonicalize,mesh(axes=pp:2+dp:2),pipeline(stage=0,at=auto,cluster=h100-80gb-4),shard(axis=dp),"
               "accumulate(steps=2,mode=reduce_last),update(clip=1.0),order"},
        Golden{"mlp.stage1.il",
               "canonicalize,mesh(axes=pp:2+dp:2),pipeline(stage=1,at=auto,cluster=h100-80gb-4),shard(axis=dp),"
               "accumulate(steps=2,mode=reduce_last),update(clip=1.0),order"},
        Golden{"mlp.search.il", "canonicalize,shard(ranks=2),update,search(evaluations=60)"}),
    [](const auto& info) {
      std::string name = info.param.file;
      for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
      return name;
    });

// Fused q, k, v are cut in three blocks, so that each rank has one of two heads.
TEST(TensorGolden, TextIsAsReviewed) {
  const std::string meta = "meta tensor \"qkv.weight 0 blocks 3; qkv.bias 0 blocks 3; out.weight 1\"\nmesh dp";
  std::string text = GoldenInput("attention.il");
  text.replace(text.find("mesh dp"), 7, meta);
  ExpectGolden("attention.tensor.il", RunText(text, "tensor(plan=model)"));
  text = GoldenInput("mlp.il");
  text.replace(text.find("step 1"), 6, "meta tensor \"up.weight 0; up.bias 0; down.weight 1\"\nstep 1");
  ExpectGolden("mlp.tensor.il", RunText(text, "canonicalize,mesh(axes=dp:1+tp:2),tensor(plan=model)"));
}

// Two ranks that cut products send to one that does not: what crosses is whole, and each of the two sends half of it.
TEST(TensorGolden, StagesThatCutUnlike) {
  std::string text = GoldenInput("mlp.il");
  text.replace(text.find("step 1"), 6, "meta tensor \"up.weight 0; up.bias 0; down.weight 1\"\nstep 1");
  for (const int stage : {0, 1}) {
    const std::string own = std::to_string(stage);
    ExpectGolden(
        "mlp.unlike" + own + ".il",
        RunText(text, "canonicalize,mesh(axes=pp:3+dp:1+tp:" + std::to_string(2 - stage) + ",stages=2+1,stage=" + own +
                          "),borders(at=down.weight,data=1+1),tensor(plan=model)," +
                          "canonicalize,pipeline(stage=" + own + ",at=down.weight,data=1+1)"));
  }
}

// A buffer changes where its next value is made, for the next micro-batch; what the backward part reads is what it was.
TEST(StageGolden, BuffersChangeInTheForwardPart) {
  std::string text = GoldenInput("mlp.il");
  const auto replace = [&](std::string_view from, std::string_view to) {
    text.replace(text.find(from), from.size(), to);
  };
  replace("param %4: f32[5] \"shift\" frozen", "buffer %4: f32[5] \"shift\" persistent");
  replace("= aten.add.Tensor(%9, %4) {fwd m0}\n",
          "= aten.add.Tensor(%9, %4) {fwd m0}\n  %22: f32[5] = aten.mul.Tensor(%4, 0.9) {fwd m0}\n");
  replace("aten.mul.Tensor(%4, 0.9) {fwd m0}\n",
          "aten.mul.Tensor(%4, 0.9) {fwd m0}\n  %23: f32[1,5] in %4+0 = aten.view(%4, [1, 5]) {fwd m0}\n");
  replace("  %14: f32[5,4]{0,0} in %12+0 = aten.t(%13) {bwd m2}\n  %15: f32[5,8] = aten.mm(%14, %7) {bwd m2}\n",
          "  %24: f32[4,5] = aten.mul.Tensor(%13, %23) {bwd m0}\n  %25: f32[4,5] = aten.add.Tensor(%24, %4) {bwd m0}\n"
          "  %14: f32[5,4]{1,5} in %25+0 = aten.t(%25) {bwd m2}\n  %15: f32[5,8] = aten.mm(%14, %7) {bwd m2}\n");
  replace("  grad(%1, %21) {bwd m1}\n", "  grad(%1, %21) {bwd m1}\n  assign(%4, %22) {fwd}\n");
  ExpectGolden("mlp.buffers.il", RunText(text, "canonicalize,mesh(axes=pp:2+dp:1),pipeline(stage=1,at=down.weight)"));
}

// Between its backward part and the gradients of weights a rank keeps its rows of what came from above, and not all.
TEST(TensorGolden, RowsGatheredAgainForWeights) {
  std::string text = GoldenInput("attention.il");
  text.replace(text.find("mesh dp 1\nmesh tp 2\n"), 20, "");
  text.replace(text.find("step 1"), 6,
               "meta tensor \"qkv.weight 0 blocks 3; qkv.bias 0 blocks 3; out.weight 1\"\nstep 1");
  ExpectGolden("attention.again.il", RunText(text,
                                             "canonicalize,mesh(axes=pp:2+dp:1+tp:2),tensor(plan=model),canonicalize,"
                                             "pipeline(stage=1,at=out.weight,backward=split,gathers=again)"));
}

TEST(ForwardOnly, StatesThatStayOutAreNamed) {
  EXPECT_EQ(RunText(GoldenInput("mlp.il"), "canonicalize,shard(ranks=2),update,forward_only(out=u0.exp_avg+u2.exp_av)"),
            "error: pass 'forward_only': the program has no state 'u2.exp_av', did you mean 'u2.exp_avg'?");
  const std::string text = RunText(GoldenInput("mlp.il"), "canonicalize,shard(ranks=2),update,forward_only(out=all)");
  EXPECT_NE(text.find("u1.momentum persistent out\n"), std::string::npos) << text;
  EXPECT_NE(text.find("u3.shard persistent out\n"), std::string::npos) << "no op reads it";
  EXPECT_NE(text.find("u0.shard persistent\n"), std::string::npos) << "forward gathers it";
}

}  // namespace
}  // namespace interlace
