#include "passes/schedule_test_support.h"

namespace interlace {
namespace {

// Four layers in two blocks; names as in a model with a list of layers. Weights of 256 bytes gathered, 128 a shard.
constexpr std::string_view kBlocks = R"(interlace 1 captured
group 0 sgd
module 0 "" "Net"
param %0: f32[64] "layers.0.up.w" trainable group 0
param %1: f32[64] "layers.0.down.w" trainable group 0
param %2: f32[64] "layers.1.up.w" trainable group 0
param %3: f32[64] "layers.1.down.w" trainable group 0
param %4: f32[64] "head.w" trainable group 0 alias "embed.w"
input %5: f32[64] "x"
phase micro_batch takes () gives () {
  %6: f32[64] = aten.mul.Tensor(%5, %0) {fwd}
  %7: f32[64] = aten.mul.Tensor(%6, %1) {fwd}
  %8: f32[64] = aten.mul.Tensor(%7, %2) {fwd}
  %9: f32[64] = aten.mul.Tensor(%8, %3) {fwd}
  %10: f32[64] = aten.mul.Tensor(%9, %4) {fwd}
  %11: f32[] = aten.sum(%10) {fwd}
  output(%11) {fwd name="loss"}
  %21: f32[64] = aten.mul.Tensor(%10, %9) {bwd}
  grad(%4, %21) {bwd}
  %12: f32[64] = aten.mul.Tensor(%10, %4) {bwd}
  %13: f32[64] = aten.mul.Tensor(%12, %8) {bwd}
  grad(%3, %13) {bwd}
  %14: f32[64] = aten.mul.Tensor(%12, %3) {bwd}
  %15: f32[64] = aten.mul.Tensor(%14, %7) {bwd}
  grad(%2, %15) {bwd}
  %16: f32[64] = aten.mul.Tensor(%14, %2) {bwd}
  %17: f32[64] = aten.mul.Tensor(%16, %6) {bwd}
  grad(%1, %17) {bwd}
  %18: f32[64] = aten.mul.Tensor(%16, %1) {bwd}
  %19: f32[64] = aten.mul.Tensor(%18, %5) {bwd}
  grad(%0, %19) {bwd}
  %20: f32[64] = aten.mul.Tensor(%18, %0) {bwd}
  output(%20) {bwd name="dx"}
}
)";

// The gathers and reductions only.
std::string Calls(const std::string& text) {
  const std::string outline = Outline(text);
  if (outline == text) return text;
  std::string out;
  for (size_t at = 0; at < outline.size();) {
    const size_t stop = std::min(outline.find(' ', at), outline.size());
    const std::string word = outline.substr(at, stop - at);
    if (word.find(':') != std::string::npos) out += (out.empty() ? "" : " ") + word;
    at = stop + 1;
  }
  return out;
}

std::string Bucketed(const std::string& options, std::string_view captured = kBlocks) {
  return Calls(RunText(std::string(captured), "shard(ranks=2,ahead=0),bucket(" + options + ")"));
}

TEST(BucketManual, OneBucketForEachListedModule) {
  EXPECT_EQ(
      Bucketed("modules=layers.0+layers.1+head"),
      "gather:u0+u1 gather:u2+u3 gather:u4 reduce:u4 gather:u4 gather:u3+u2 reduce:u3+u2 gather:u1+u0 reduce:u1+u0");
  EXPECT_EQ(Bucketed("modules=layers.*+head"), Bucketed("modules=layers.0+layers.1+head"));
  EXPECT_EQ(Bucketed("modules=layers"),
            "gather:u0+u1+u2+u3 gather:u4 reduce:u4 gather:u4 gather:u3+u2+u1+u0 reduce:u3+u2+u1+u0");
  EXPECT_EQ(
      Bucketed("modules=layers.*.up"),
      "gather:u0 gather:u1 gather:u2 gather:u3 gather:u4 reduce:u4 gather:u4 reduce:u3 gather:u3 reduce:u2 gather:u2 "
      "reduce:u1 gather:u1 reduce:u0 gather:u0")
      << "buckets of one";
}

TEST(BucketManual, ATiedParameterIsFoundByItsOtherName) {
  EXPECT_EQ(Bucketed("modules=embed"), Bucketed("modules=head"));
  EXPECT_EQ(Bucketed("modules=embed+layers.1"), Bucketed("modules=head+layers.1")) << "no overlap";
}

TEST(BucketManual, Errors) {
  EXPECT_EQ(Bucketed(""),
            "error: pass 'bucket': bucket(mode=manual) needs modules=a+b, for example modules=model.layers.*; or take "
            "mode=greedy");
  EXPECT_EQ(Bucketed("modules=layer.0"),
            "error: pass 'bucket': option modules: 'layer.0' owns no parameter, did you mean 'layers.0'?");
  EXPECT_EQ(Bucketed("modules=layer.*"),
            "error: pass 'bucket': option modules: 'layer.*' owns no parameter, did you mean 'layers.*'?");
  EXPECT_EQ(
      Bucketed("modules=layers.0+zzz"),
      "error: pass 'bucket': option modules: 'zzz' owns no parameter; for example 'head', 'layers', 'layers.0' do");
  EXPECT_EQ(Bucketed("modules=layers.*+layers.1"),
            "error: pass 'bucket': option modules: 'layers.*' and 'layers.1' overlap: both own 'layers.1.up.w'");
  EXPECT_EQ(Bucketed("modules=head+head"),
            "error: pass 'bucket': option modules: 'head' and 'head' overlap: both own 'head.w'");
  EXPECT_EQ(Bucketed("mode=greedy,modules=head"),
            "error: pass 'bucket': bucket(mode=greedy) finds the buckets itself; leave modules= out");
}

TEST(BucketManual, ReductionsThatCannotWaitForOneAnotherAreRefused) {
  // The sum of b's gradient is an output before that of a is there.
  std::string text = RunText(std::string(kTwoLayers), "shard(ranks=2,ahead=0,wait=now)");
  const size_t wait = text.find("  reduce.wait("), end = text.find('\n', wait) + 1;
  const std::string sum = text.substr(text.find('%', wait), text.find(')', wait) - text.find('%', wait));
  text.insert(end, "  %900: f32[32] = aten.neg(" + sum + ") {bwd}\n  output(%900) {bwd name=\"early\"}\n");
  EXPECT_EQ(RunText(text, "bucket(modules=net)"),
            "error: pass 'bucket': the reductions of u1 and u0 cannot be one: the sum of one is used before the "
            "other's gradients are "
            "there");
}

TEST(BucketManual, ASecondRunChangesNothing) {
  const std::string once = RunText(std::string(kBlocks), "shard(ranks=2),bucket(modules=layers.*)");
  EXPECT_EQ(RunText(once, "bucket(modules=layers.*)"), once);
}

TEST(BucketManual, AfterUnshardTheRestIsOneCall) {
  EXPECT_EQ(Calls(RunText(std::string(kBlocks), "shard(ranks=2,ahead=0),unshard(units=u0),bucket(modules=layers.*)")),
            "gather:u0+u1 gather:u2+u3 gather:u4 reduce:u4 gather:u4 gather:u3+u2 reduce:u3+u2 gather:u1 reduce:u1+u0");
}

// A profile gives every mul 24 us, which hides one gather of 512 bytes (8 + 512/32 = 24 us) in model time.
std::string MulTakes(const std::string& us) {
  return HandProfile("op \"aten.mul.Tensor(f32[64],f32[64])->f32[64]\" us " + us + " bytes 256 transient 0 measured\n" +
                     "op \"aten.mul.Tensor(f32[64],f32[64])->!f32[64]\" us " + us +
                     " bytes 256 transient 0 measured\n" +
                     "op \"aten.sum(f32[64])->f32[]\" us 1 bytes 4 transient 0 measured\n");
}

std::string Forward(const std::string& options) {
  const std::string calls = Bucketed("mode=greedy," + HandCluster() + "," + options);
  return calls.substr(0, calls.find(" reduce"));
}

TEST(BucketGreedy, AGatherJoinsWhileTheStepBeforeHidesTheCall) {
  // Step of u0: one mul. Faithful: T = 8 us + V at 16 bytes/us, T(512) = 40 us, T(768) = 56 us.
  EXPECT_EQ(Forward("time=model," + MulTakes("24")), "gather:u0 gather:u1+u2 gather:u3+u4") << "24 <= 24 holds";
  EXPECT_EQ(Forward("time=model," + MulTakes("23.9")), "gather:u0 gather:u1 gather:u2 gather:u3 gather:u4");
  EXPECT_EQ(Forward(MulTakes("24")), "gather:u0 gather:u1 gather:u2 gather:u3 gather:u4");
  EXPECT_EQ(Forward(MulTakes("40")), "gather:u0 gather:u1+u2 gather:u3+u4")
      << "40 <= 40 holds; the step of u1+u2 is 80 us";
  EXPECT_EQ(Forward(MulTakes("56")), "gather:u0 gather:u1+u2+u3 gather:u4");
}

TEST(BucketGreedy, MemoryOfTheJoinedStepsStaysUnderTheLimit) {
  // One mul works on three storages of 256 bytes: Mc_i = 768.
  EXPECT_EQ(Forward("limit=1536," + MulTakes("56")), "gather:u0 gather:u1+u2 gather:u3+u4")
      << "1536 <= 1536, 2304 is too much";
  EXPECT_EQ(Forward("limit=1535," + MulTakes("56")), "gather:u0 gather:u1 gather:u2 gather:u3 gather:u4");
}

TEST(BucketGreedy, BackwardAlsoHidesTheReductionOfTheStepBefore) {
  // Backward steps: u4 (one mul and that of u3's gradient: 2 muls), u3 (2), u2 (2), u1 (2), u0 (1). T_AG(512) = 40,
  // T_RS(256) = 24.
  const auto backward = [](const std::string& us) {
    const std::string calls = Bucketed("mode=greedy," + HandCluster() + "," + MulTakes(us));
    return calls.substr(calls.find("reduce"));
  };
  // 2 muls of 20: nothing reduced before the first step, so u3+u2 join (40 <= 40); then the step of u3+u2 takes 80:
  // T_RS(u4) 24 + T_AG(u1+u0) 40 <= 80.
  EXPECT_EQ(backward("20"), "reduce:u4 gather:u4 gather:u3+u2 reduce:u3+u2 gather:u1+u0 reduce:u1+u0");
  EXPECT_EQ(backward("19.9"),
            "reduce:u4 gather:u4 reduce:u3 gather:u3 reduce:u2 gather:u2 reduce:u1 gather:u1 reduce:u0 gather:u0")
      << "39.8 hides no two gathers, and later steps have a reduction to hide as well";
}

TEST(BucketGreedy, BetweenNodesTheirLinksCount) {
  const std::string cluster = HandCluster("per_node = 2", "per_node = 1");  // 100 us + V at 1 byte/us: T(512) = 612
  const auto forward = [&](const std::string& us) {
    const std::string calls = Bucketed("mode=greedy," + cluster + "," + MulTakes(us));
    return calls.substr(0, calls.find(" reduce"));
  };
  EXPECT_EQ(forward("612"), "gather:u0 gather:u1+u2 gather:u3+u4");
  EXPECT_EQ(forward("611"), "gather:u0 gather:u1 gather:u2 gather:u3 gather:u4");
}

TEST(BucketCopies, OneBufferWithCopiesInAndOut) {
  const std::string text = RunText(std::string(kTwoLayers), "shard(ranks=2,ahead=0),bucket(modules=net,pack=copy)");
  EXPECT_EQ(Outline(text),
            "cat gather:u2 wait copy copy release mul release mul release sum mul cat gather:u2 wait copy copy release "
            "mul release "
            "mul cat release release reduce:u2 mul release wait_reduce release copy copy release");
  EXPECT_NE(text.find("unit u2 dp f32 numel 128 shard 64\n"), std::string::npos) << text;
  EXPECT_NE(text.find("{64,1} in %"), std::string::npos) << "rows of one unit in the bucket\n" << text;
}

TEST(BucketCopies, TheWaitMovesWithItsCopies) {
  // Two buckets: reorder puts the gather of the second before the wait and the copies of the first.
  EXPECT_EQ(Outline(RunText(std::string(kBlocks), "shard(ranks=2,ahead=0),bucket(modules=layers.*,pack=copy),reorder"))
                .substr(0, 60),
            "cat gather:u5 cat gather:u6 wait copy copy release mul relea");
}

TEST(BucketCopies, Errors) {
  EXPECT_EQ(
      RunText(std::string(kTwoLayers),
              "shard(ranks=2,ahead=0),accumulate(steps=2),update,unshard(units=u0),bucket(modules=net,pack=copy)"),
      "error: pass 'bucket': u0 is kept gathered across micro-batches and cannot be copied out of a bucket; run "
      "bucket(pack=copy) before unshard");
}

TEST(Bucket, KeepsBits) {
  for (const char* bucket : {"bucket(modules=layers.*)", "bucket(modules=layers.*,pack=copy)",
                             "bucket(mode=greedy,cluster=h100-80gb-2,pack=copy)", "bucket(modules=layers+head)",
                             "bucket(mode=greedy,cluster=h100-80gb-2)"}) {
    for (const char* after :
         {"", ",reorder", ",prefetch(alpha=1)", ",unshard(units=all)", ",reorder(forward=after,backward=before)"}) {
      for (int64_t steps : {1, 3}) {
        for (const char* mode : {"reduce_each", "reduce_last"}) {
          const std::string pipeline = "shard(ranks=2),accumulate(steps=" + std::to_string(steps) + ",mode=" + mode +
                                       "),update," + bucket + after;
          EXPECT_EQ(BitsDiffer(std::string(kBlocks), pipeline, steps, mode), "") << pipeline;
        }
      }
    }
  }
}

}  // namespace
}  // namespace interlace
