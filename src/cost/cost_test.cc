#include <gtest/gtest.h>

#include <cmath>

#include "cost/cluster.h"
#include "cost/collective_model.h"
#include "cost/cost_model.h"
#include "cost/kernel_model.h"
#include "cost/profile_table.h"
#include "cost/signature.h"
#include "cost/testing/print_profile.h"
#include "ir/testing/golden.h"
#include "ir/text.h"

namespace interlace {
namespace {

ClusterSpec Preset(std::string_view name) {
  Result<ClusterSpec> cluster = LoadCluster(name, "cluster");
  EXPECT_TRUE(cluster.ok()) << (cluster.ok() ? "" : cluster.error().ToString());
  return cluster.ok() ? *cluster : ClusterSpec{};
}

// The preset with one piece of its text replaced.
std::string Edited(std::string_view preset, const std::string& from, const std::string& to) {
  std::string text = *PresetCluster(preset);
  size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

TEST(Cluster, EveryPresetReads) {
  for (std::string_view name : PresetNames()) {
    for (int count : {1, 2, 8, 64, 4096}) {
      std::string full = std::string(name) + "-" + std::to_string(count);
      Result<ClusterSpec> cluster = LoadCluster(full, full);
      ASSERT_TRUE(cluster.ok()) << cluster.error().ToString();
      EXPECT_EQ(cluster->devices, count);
      EXPECT_EQ(cluster->name, full);
    }
  }
  EXPECT_EQ(Preset("h100-80gb-32").per_node, 8);
  EXPECT_EQ(Preset("l4-24gb-4").per_node, 4);
  EXPECT_EQ(Preset("local-4").per_node, 4);
  EXPECT_TRUE(Preset("local-2").cpu);
}

TEST(Cluster, TextIsAsReviewed) {
  interlace::testing::ExpectGolden("sim/a100-40gb-2.toml", *PresetCluster("a100-40gb-2"));
}

TEST(Cluster, PresetErrors) {
  EXPECT_EQ(ErrorOf(LoadCluster("h10-80gb-8", "c")),
            "there is no cluster file or preset 'h10-80gb-8', did you mean 'h100-80gb'? presets: h100-80gb-N, "
            "h200-141gb-N, b200-180gb-N, mi300x-192gb-N, a100-80gb-N, a100-40gb-N, a10g-24gb-N, l4-24gb-N, local-N");
  EXPECT_EQ(ErrorOf(LoadCluster("h100-80gb", "c")),
            "the preset 'h100-80gb' needs a number of devices, for example 'h100-80gb-8'");
  EXPECT_EQ(ErrorOf(LoadCluster("h100-80gb-0", "c")),
            "the number of devices in 'h100-80gb-0' must be from 1 to 1048576");
  EXPECT_EQ(ErrorOf(LoadCluster("h100-80gb-12", "c")),
            "'h100-80gb-12' does not fill nodes of 8 devices; take a multiple of 8");
}

TEST(Cluster, FileErrorsShowTheLine) {
  EXPECT_EQ(ErrorOf(ParseCluster(Edited("local-2", "copy_us = 2", "copy_uss = 2"), "c.toml")),
            "c.toml:36:1: unknown key 'copy_uss' in [host], did you mean 'copy_us'?\n  copy_uss = 2\n  ^");
  EXPECT_EQ(ErrorOf(ParseCluster(Edited("local-2", "[intra]", "[inner]"), "c.toml")).substr(0, 54),
            "c.toml:45:1: unknown table [inner], did you mean 'inte");
  EXPECT_EQ(ErrorOf(ParseCluster(Edited("local-2", "gb_per_s = 1.0 ", "gb_per_s = 0.0 "), "c.toml")).substr(0, 47),
            "c.toml:46:12: 'gb_per_s' must be above zero\n  g");
  EXPECT_NE(
      ErrorOf(ParseCluster(Edited("local-2", "alpha_us = 30", "alpha_us = -1"), "c")).find("must not be negative"),
      std::string::npos);
  EXPECT_NE(ErrorOf(ParseCluster(Edited("local-2", "cores = 2", "cores = \"2\""), "c")).find("expected a number"),
            std::string::npos);
  EXPECT_NE(ErrorOf(ParseCluster(Edited("local-2", "cores = 2", "cores = 2\ncores = 3"), "c"))
                .find("the key 'cores' is given twice"),
            std::string::npos);
  EXPECT_NE(ErrorOf(ParseCluster(Edited("local-2", "tier = \"file\"", "tier = \"disk\""), "c"))
                .find("c:40:8: tier is \"file\" or \"memory\""),
            std::string::npos);
  EXPECT_NE(ErrorOf(ParseCluster(Edited("local-2", "kind = \"cpu\"", "kind = \"gpu\""), "c"))
                .find("c:40:8: tier = \"file\" needs kind = \"cpu\": accelerators have their tier in host memory"),
            std::string::npos);
  EXPECT_NE(ErrorOf(ParseCluster(Edited("local-2", "tier = \"file\"", "tier_gb_per_s = 1"), "c"))
                .find("tier_gb_per_s needs tier = \"file\""),
            std::string::npos);
  EXPECT_EQ(ErrorOf(ParseCluster(Edited("local-2", "cores = 2\n", "\n"), "c")),
            "c: the key 'cores' in [host] is missing");
  EXPECT_NE(ErrorOf(ParseCluster(Edited("local-2", "devices = 2", "devices = 3"), "c")).find("must fill whole nodes"),
            std::string::npos);
  EXPECT_NE(
      ErrorOf(ParseCluster(Edited("local-2", "mm_efficiency = 0.95", "mm_efficiency = 1.5"), "c")).find("at most 1"),
      std::string::npos);
  EXPECT_NE(ErrorOf(ParseCluster(Edited("h100-80gb-8", "= 989.5", "= 989500"), "c")).find("in another unit?"),
            std::string::npos);
  EXPECT_NE(ErrorOf(ParseCluster(Edited("h100-80gb-8", "= 3350 ", "= 3.35 "), "c")).find("is it in TB/s?"),
            std::string::npos);
  EXPECT_NE(ErrorOf(ParseCluster(Edited("local-2", "\"none\"", "\"h200\""), "c")).find("the fitted tables are"),
            std::string::npos);
  EXPECT_NE(
      ErrorOf(ParseCluster(Edited("local-2", "devices = 2", "devices = 99999999999999999999"), "c")).find("64 bits"),
      std::string::npos);
  EXPECT_NE(ErrorOf(ParseCluster("a = [1, [2]]\n", "c")).find("a list in a list"), std::string::npos);
  EXPECT_NE(ErrorOf(ParseCluster("a = \n", "c")).find("found the end of the line"), std::string::npos);
}

TEST(Cluster, Stacks) {
  EXPECT_EQ(Preset("h100-80gb-8").stack, "kernels");
  ClusterSpec alone = Preset("h100-80gb-8:kernels"), eager = Preset("h100-80gb-8:eager");
  EXPECT_EQ(alone.step.products, 1);
  EXPECT_EQ(alone.issue_us, 2);
  EXPECT_EQ(eager.name, "h100-80gb-8:eager");
  EXPECT_LT(eager.step.products, 1);
  EXPECT_GT(eager.issue_us, alone.issue_us) << "launched from Python";
  EXPECT_LT(eager.step.issue_backward, alone.step.issue_backward) << "launched by autograd";
  KernelWork product;
  product.kind = KernelWork::Kind::kProduct;
  product.dtype = DType::kBF16;
  product.m = product.n = product.k = 8192;
  product.flops = 2 * product.m * product.n * product.k;
  EXPECT_NEAR((KernelUs(eager, product) - eager.shortest_us) * eager.step.products,
              KernelUs(alone, product) - alone.shortest_us, 1e-6);
  EXPECT_EQ(ErrorOf(LoadCluster("h100-80gb-8:eagre", "c")),
            "'h100-80gb-8:eagre' is of no software stack that is known, did you mean 'eager'?; stacks: kernels, ours, "
            "eager, compiled, graph, megatron");
}

TEST(Cluster, StackErrors) {
  auto error = [](const std::string& from, const std::string& to) {
    return ErrorOf(ParseCluster(Edited("h100-80gb-8", from, to), "c"));
  };
  EXPECT_NE(error("\nproducts = 0.76 ", "\nproducts = 7 ").find("'products' is outside of what is possible, 0.05 to 1"),
            std::string::npos);
  EXPECT_NE(error("\n[step.ours]", "\n[step.lazy]")
                .find("no stack is called 'lazy'; stacks: kernels, ours, eager, compiled, graph, megatron"),
            std::string::npos);
  EXPECT_NE(error("\nproducts = 0.76 ", "\nproduct = 0.7 ")
                .find("unknown key 'product' in [step.graph], did you mean 'products'?"),
            std::string::npos);
  EXPECT_NE(ErrorOf(LoadCluster("local-2:eager", "c")).find("there is no table [step.eager]"), std::string::npos);
}

TEST(Cluster, PresetsThatDifferInAFewLines) {
  ClusterSpec small = Preset("a100-40gb-8"), large = Preset("a100-80gb-8");
  EXPECT_EQ(large.memory_gib, 80);
  EXPECT_EQ(large.memory_gb_per_s, 2039);
  EXPECT_EQ(large.device_name, "A100 SXM4 80GB");
  EXPECT_EQ(large.mm_efficiency, small.mm_efficiency);
  EXPECT_EQ(large.intra.gb_per_s, small.intra.gb_per_s);
  EXPECT_EQ(Preset("mi300x-192gb-8").processors, 304);
  EXPECT_EQ(Preset("b200-180gb-8").tflops_half, 2250);
  EXPECT_EQ(Preset("a10g-24gb-4").memory_gb_per_s, 600);
  const ClusterSpec eager = Preset("a100-80gb-8:eager"), ours = Preset("a100-80gb-8:ours");
  EXPECT_EQ(ours.step.products, Preset("a100-80gb-8:compiled").step.products);
  EXPECT_EQ(ours.step.memory, 1) << "regions are counted one by one";
  EXPECT_LT(ours.issue_us, eager.issue_us);
  EXPECT_EQ(Preset("a100-80gb-8:graph").step.products, eager.step.products);
}

TEST(Interference, TheAlgorithmByHand) {
  // Compute 4 and gather 2 together, factors 1.5 and 2: scaled 6 and 4, the gather ends at 4, when 4/1.5 = 2.667 of
  // compute is done; 1.333 is left.
  std::array<double, 28> factors;
  factors.fill(1);
  factors[16] = 1.5, factors[17] = 2;  // after 4 + 4 * 3 factors comes the pair (compute, device)
  Interference f = Interference::FromFactors(factors);
  EXPECT_DOUBLE_EQ(f.Together({4, 2, 0, 0}), 4 + 4.0 / 3);
  EXPECT_DOUBLE_EQ(f.Together({4, 0, 2, 0}), 4) << "another pair";
  EXPECT_DOUBLE_EQ(f.Together({0, 3, 0, 0}), 3);
  EXPECT_DOUBLE_EQ(f.Together({2, 2, 1, 0}), 1 + 1.5 + 0.25) << "three for 1, then both are at 1: 1.5 and 2";
}

TEST(Interference, NearestFittedTopology) {
  EXPECT_EQ(FindInterference("h100", 8, 1), nullptr);
  const Interference* eight = FindInterference("a100", 8, 4);
  EXPECT_EQ(FindInterference("a100", 8, 64), eight);
  EXPECT_NE(FindInterference("a100", 8, 1), eight);
  EXPECT_EQ(InterferenceOn(Preset("a100-40gb-32:eager"), 8, 4), eight) << "46 of 219 GB/s";
  EXPECT_EQ(InterferenceOn(Preset("h100-80gb-32"), 8, 4), eight) << "of kernels";
  EXPECT_EQ(InterferenceOn(Preset("h100-80gb-32:eager"), 8, 4), FindInterference("a100", 8, 1)) << "319 of 361 GB/s";
  for (int set = 0; set < 16; ++set) {
    for (double factor : eight->factor[set]) EXPECT_GE(factor, 1.0);
  }
}

TEST(Collectives, GroupsOnNodes) {
  std::vector<Axis> mesh = {{"dp", 4}, {"tp", 2}};
  GroupShape tp = GroupShapeOf(mesh, "tp", 4), dp = GroupShapeOf(mesh, "dp", 4);
  EXPECT_TRUE(tp.within_node());
  EXPECT_EQ(tp.members_per_node, 2);
  EXPECT_EQ(dp.ranks, 4);
  EXPECT_EQ(dp.members_per_node, 2);
  EXPECT_EQ(dp.nodes, 2);
  EXPECT_EQ(GroupShapeOf(mesh, "pp", 4).ranks, 1);
}

TEST(Collectives, RingByHand) {
  ClusterSpec c = Preset("h100-80gb-16");
  c.inter = {10, 320, 0, 0};
  GroupShape group = GroupShapeOf({{"dp", 16}}, "dp", 8);
  CollectiveTime gather = RingTime(c, group, Exchange::kGather, 320e6, 1);
  EXPECT_DOUBLE_EQ(gather.latency_us, 150);
  EXPECT_DOUBLE_EQ(gather.transfer_us, 320e6 * 15 / 16 / 320e3);
  CollectiveTime all = RingTime(c, group, Exchange::kAllReduce, 320e6, 1);
  EXPECT_DOUBLE_EQ(all.latency_us, 300);
  EXPECT_DOUBLE_EQ(all.transfer_us, 2 * gather.transfer_us);
  // One member of each node has an eighth of its network.
  GroupShape thin = GroupShapeOf({{"dp", 2}, {"tp", 8}}, "dp", 8);
  EXPECT_DOUBLE_EQ(RingTime(c, thin, Exchange::kGather, 80e6, 1).transfer_us, 80e6 / 2 / 40e3);
  EXPECT_EQ(RingTime(c, GroupShapeOf({{"dp", 1}}, "dp", 8), Exchange::kGather, 1e6, 1).transfer_us, 0);
}

TEST(Collectives, AllReduceTakesTheFastestWay) {
  ClusterSpec c = Preset("h100-80gb-1024");
  auto us = [&](std::string_view kind, int64_t mib, int64_t ranks) {
    Result<OneCollective> one = PredictCollective(c, kind, mib << 20, ranks);
    EXPECT_TRUE(one.ok()) << ErrorOf(one);
    return one.ok() ? *one : OneCollective{};
  };
  EXPECT_EQ(us("all_reduce", 1024, 8).time.algorithm, Algorithm::kSwitch);
  EXPECT_EQ(us("all_reduce", 1024, 64).time.algorithm, Algorithm::kTree);
  EXPECT_EQ(us("all_gather", 1024, 64).time.algorithm, Algorithm::kRing);
  // nccl-tests on p5.48xlarge, us: github.com/crazyguitar/aws-gpu-communication-benchmark.
  EXPECT_NEAR(us("all_reduce", 8192, 16).us, 33716, 0.1 * 33716);
  EXPECT_NEAR(us("all_reduce", 512, 64).us, 3884, 0.15 * 3884);
  EXPECT_NEAR(us("all_reduce", 32, 128).us, 873, 0.2 * 873);
  EXPECT_LT(us("all_reduce", 32, 1024).us, 4 * us("all_reduce", 32, 64).us) << "a ring's would grow with the ranks";
  EXPECT_GE(us("all_reduce", 1024, 256).us, us("all_reduce", 1024, 128).us);
  EXPECT_EQ(ErrorOf(PredictCollective(c, "allreduce", 1, 8)),
            "no collective is called 'allreduce', did you mean 'all_reduce'?");
  EXPECT_EQ(ErrorOf(PredictCollective(c, "all_reduce", 0, 8)), "a collective of 0 bytes; give at least one");
  EXPECT_EQ(ErrorOf(PredictCollective(c, "all_reduce", 1, 2048)),
            "a collective of 2048 ranks; h100-80gb-1024 has room for 2 to 1024");
  EXPECT_EQ(ErrorOf(PredictCollective(c, "all_reduce", 1, 12)), "12 ranks do not fill nodes of 8 devices");
}

TEST(Kernels, AttentionByHeadSize) {
  ClusterSpec c = Preset("h100-80gb-8:eager");
  auto us = [&](double head) {
    KernelWork w;
    w.kind = KernelWork::Kind::kAttention;
    w.dtype = DType::kBF16;
    w.sequence = 4096, w.head = head;
    w.flops = 4.0 * 32 * 4096 * 4096 * head;
    return (KernelUs(c, w) - c.shortest_us) / head;
  };
  EXPECT_NEAR(us(128) / us(64), 0.87, 1e-9) << "flash-attention 0251105: 257 of 294 TFLOP/s";
  EXPECT_NEAR(us(96) * 96, us(80) * 80, 1e-6) << "80 is computed as 96";
}

TEST(Kernels, ProductsOfOddRowsRunAtHalfTheRate) {
  auto us = [](const std::string& cluster, int64_t words) {
    const std::string n = std::to_string(words);
    const Result<Program> program = Parse(
        "interlace 1 captured\nstep 1 reduce_each\ninput %0: bf16[4096,1024] \"x\"\ninput %1: bf16[1024," + n +
        "] \"w\"\nphase micro_batch takes () gives () {\n  %2: bf16[4096," + n + "] = aten.mm(%0, %1) {fwd}\n}\n");
    EXPECT_TRUE(program.ok()) << ErrorOf(program);
    if (!program.ok()) return 0.0;
    const ClusterSpec c = Preset(cluster);
    return KernelUs(c, *WorkOf(*program, program->op(program->phases[0].ops[0]))) - c.shortest_us;
  };
  EXPECT_NEAR(us("a100-80gb-8:eager", 50257) / us("a100-80gb-8:eager", 50304), 2, 0.02);
  EXPECT_NEAR(us("a100-80gb-8", 50257) / us("a100-80gb-8", 50304), 1, 0.02) << "kernels alone are as in their tables";
}

TEST(Kernels, PublicH100Rates) {
  ClusterSpec c = Preset("h100-80gb-8:kernels");
  auto tflops = [&](double m, double n, double k) {
    KernelWork w;
    w.kind = KernelWork::Kind::kProduct;
    w.dtype = DType::kBF16;
    w.m = m, w.n = n, w.k = k;
    w.flops = 2 * m * n * k;
    w.bytes = 2 * (m * n + n * k + m * k);
    return w.flops / KernelUs(c, w) / 1e6;
  };
  // kernels.md's sources: zzc0721/torch-performance-test-data#79, vLLM#17126.
  EXPECT_NEAR(tflops(4096, 4096, 4096), 788.7, 0.05 * 788.7);
  EXPECT_NEAR(tflops(8192, 8192, 8192), 797.5, 0.05 * 797.5);
  EXPECT_NEAR(tflops(2048, 2048, 2048), 676.6, 0.10 * 676.6);
  EXPECT_NEAR(tflops(16, 6144, 4096), 39.1, 0.10 * 39.1);
  EXPECT_NEAR(tflops(256, 6144, 4096), 544.3, 0.10 * 544.3);
}

constexpr std::string_view kProgram = R"(interlace 1 scheduled
mesh dp 2
unit u0 dp f32 numel 65536 shard 32768
unit u1 dp f32 numel 65536 shard 32768
input %2: f32[512,256] "x"
state %4: f32[32768] u0.shard persistent
state %14: f32[32768] u1.shard persistent
phase micro_batch takes () gives () {
  %6: f32[65536], %16: f32[65536] = gather.start(%4, %14) {fwd lane=gather units=[u0,u1]}
  gather.wait(%6, %16) {fwd lane=gather}
  %7: f32[256,256] in %6+0 = view(%6) {fwd lane=compute}
  %8: f32[256,256]{1,256} in %6+0 = view(%6) {fwd lane=compute}
  %9: f32[512,256] = aten.mm(%2, %7) {fwd lane=compute}
  %10: f32[512,256] = aten.mm(%2, %8) {fwd lane=compute}
  %11: f32[512,256] = aten.add.Tensor(%9, %10, alpha=1) {fwd lane=compute}
  release(%6, %16) {fwd lane=compute}
}
)";

Program ParseOrDie(std::string_view text) {
  Result<Program> program = Parse(text);
  EXPECT_TRUE(program.ok()) << ErrorOf(program);
  return program.ok() ? std::move(*program) : Program();
}

TEST(CostModel, OpsOfAProgram) {
  Program program = ParseOrDie(kProgram);
  ClusterSpec cluster = Preset("a100-40gb-2");
  Result<CostModel> model = CostModel::Create(program, cluster, nullptr);
  ASSERT_TRUE(model.ok()) << ErrorOf(model);
  std::vector<OpCost> costs;
  for (OpId id : program.phases[0].ops) {
    Result<OpCost> cost = model->Cost(program.op(id));
    ASSERT_TRUE(cost.ok()) << ErrorOf(cost);
    costs.push_back(*cost);
  }
  EXPECT_EQ(costs[0].resource, Resource::kIntraLink);
  EXPECT_EQ(costs[0].latency_ps, 8'400'000) << "one hop, one coalesced call";
  EXPECT_EQ(costs[0].bytes, 262144) << "half of two units of 256 KiB";
  EXPECT_EQ(costs[0].work_ps, static_cast<int64_t>(std::ceil(262144 / 219e3 * 1e6)));
  EXPECT_EQ(costs[1].work_ps, 0);
  EXPECT_EQ(costs[2].resource, Resource::kNone);
  double flops_us = 2.0 * 512 * 256 * 256 / (19.5e6);
  EXPECT_GT(costs[4].work_ps, flops_us * 1e6);
  EXPECT_NE(costs[4].work_ps, costs[5].work_ps) << "a transposed weight has its own curve";
  double bytes_us = 3 * 512 * 256 * 4 / 2500e3;  // fits the cache
  EXPECT_NEAR(costs[6].work_ps, (2.8 + bytes_us) * 1e6, 2);
  EXPECT_EQ(model->coverage().ops, 3);

  ClusterSpec separate = Preset("local-2");
  separate.coalesce = false;
  Result<CostModel> slow = CostModel::Create(program, separate, nullptr);
  EXPECT_EQ(slow->Cost(program.op(program.phases[0].ops[0]))->latency_ps, 2 * 30'000'000) << "a message for each unit";
}

TEST(CostModel, MeasuredTimesComeFirst) {
  Program program = ParseOrDie(kProgram);
  std::string key;
  ASSERT_TRUE(AppendSignature(program, program.op(program.phases[0].ops[5]), key).ok());
  EXPECT_EQ(key, "aten.mm(f32[512,256],f32[256,256]{1,256})->f32[512,256]");
  std::string text = "interlace-profile 1\nfingerprint \"me\"\nop \"" + key +
                     "\" us 12.5 bytes 524288 transient 64 measured\n" +
                     "collective gather ranks 2 bytes 0 us 5\ncollective gather ranks 2 bytes 1048576 us 105\n";
  Result<ProfileTable> table = ParseProfile(text, "p");
  ASSERT_TRUE(table.ok()) << ErrorOf(table);
  Result<CostModel> model = CostModel::Create(program, Preset("a100-40gb-2"), &*table);
  OpCost mm = *model->Cost(program.op(program.phases[0].ops[5]));
  EXPECT_EQ(mm.work_ps, 12'500'000);
  EXPECT_EQ(mm.transient_bytes, 64);
  EXPECT_EQ(mm.source, OpCost::Source::kMeasured);
  OpCost gather = *model->Cost(program.op(program.phases[0].ops[0]));
  EXPECT_EQ(gather.latency_ps, 5'000'000);
  EXPECT_EQ(gather.work_ps, 50'000'000) << "512 KiB of the megabyte that takes 100 us more than nothing";
}

TEST(CostModel, ProgramAndClusterMustMatch) {
  Program program = ParseOrDie(kProgram);
  EXPECT_EQ(
      ErrorOf(CostModel::Create(program, Preset("local-1"), nullptr)),
      "the program's mesh has 2 ranks, the cluster 'local-1' has 1 device; take a larger cluster or a smaller mesh");
  program.mesh.assign(4, Axis{"x", int64_t{1} << 40});
  EXPECT_EQ(ErrorOf(CostModel::Create(program, Preset("local-1"), nullptr)),
            "the mesh has more ranks than fit in 64 bits");
  EXPECT_FALSE(Picoseconds(1e13).ok());
}

TEST(CostModel, SizesMustBeNumbers) {
  Program program = ParseOrDie(R"(interlace 1 captured
symbol b 2 4096
input %0: f32[b,32] "x"
phase micro_batch takes () gives () {
  %1: f32[b,32] = aten.relu(%0) {fwd}
}
)");
  Result<CostModel> model = CostModel::Create(program, Preset("local-1"), nullptr);
  EXPECT_EQ(ErrorOf(model->Cost(program.op(0))),
            "%1: f32[b,32] = aten.relu(%0) {fwd}: a size is not yet a number; bind the symbols first");
}

TEST(Profile, PrintsAndReadsBack) {
  std::string text = R"(interlace-profile 2
fingerprint "a \"b\""
op "aten.a(f32[1])->f32[1]" us 0.25 bytes 4 transient 0 estimated
op "aten.b()->f32[1]" us 1e-05 bytes 4 transient 8 measured
collective gather ranks 2 bytes 0 us 5
collective gather ranks 2 bytes 1024 us 6.5
core gather ranks 2 bytes 1024 us 9
finish reduce ranks 2 bytes 1024 us 0.5
copy h2d bytes 64 us 2
issue us 1.25
together collective 1 file_write 2.5
together compute 1.0625 collective 1
together file_read 1.5 file_write 1000
interference [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1.5]
)";
  Result<ProfileTable> table = ParseProfile(text, "p");
  ASSERT_TRUE(table.ok()) << ErrorOf(table);
  EXPECT_EQ(PrintProfile(*table), text);
}

TEST(Interference, NothingGetsFasterWhenMoreRuns) {
  for (std::string_view gpu : {"l4", "a100"}) {
    for (int64_t per_node : {1, 2, 4, 8}) {
      for (int64_t nodes : {1, 2, 4}) {
        const Interference& fitted = *FindInterference(gpu, per_node, nodes);
        for (int set = 1; set < 16; ++set) {
          for (int more = 1; more < 16; ++more) {
            if ((set & more) != set) continue;
            for (int member = 0; member < Interference::kClasses; ++member) {
              if ((set >> member & 1) == 0) continue;
              EXPECT_LE(fitted.factor[set][member], fitted.factor[more][member]) << gpu << " " << set << " " << more;
            }
          }
        }
      }
    }
  }
}

TEST(Interference, MeasuredPairsAddUpAndLargerFactorsOfWhatIsUnknownStay) {
  Interference known;
  known.factor[0b1111][1] = known.factor[0b0101][0] = 4;
  known.Measured({{{0, 1.5, 1.25, 1}, {0, 0, 1, 1}, {1.125, 1, 0, 2}, {1, 1, 3, 0}}});
  EXPECT_EQ(known.factor[0b0011][0], 1.5);
  EXPECT_EQ(known.factor[0b0101][0], 1.25);
  EXPECT_EQ(known.factor[0b0111][0], 1.75);
  EXPECT_EQ(known.factor[0b1111][1], 4);
  EXPECT_EQ(known.factor[0b1111][0], 1.75);
  EXPECT_EQ(known.factor[0b1101][2], 2.125);
  EXPECT_EQ(known.factor[0b1100][3], 3);
  EXPECT_EQ(known.factor[0b0001][0], 1);
}

// On a CPU whose tier is a file, what leaves memory costs what files cost, measured or not, within the tier's limit.
TEST(CostModel, AFileTierCopiesAsFilesDo) {
  Program program = ParseOrDie(kProgram);
  ClusterSpec cluster = Preset("local-2");
  ProfileTable table = *ParseProfile(
      "interlace-profile 2\ncopy h2d bytes 0 us 1\ncopy h2d bytes 1000000 us 2\n"
      "copy file_read bytes 0 us 100\ncopy file_read bytes 1000000 us 600\n",
      "p");
  auto read = [&](const ProfileTable* profile) {
    return *CostModel::Create(program, cluster, profile)->CopyCost(Lane::kH2D, /*to_device=*/true, 1e6);
  };
  EXPECT_EQ(read(&table).resource, Resource::kFile);
  EXPECT_EQ(read(&table).latency_ps, 100'000'000);
  EXPECT_EQ(read(&table).work_ps, 500'000'000);
  EXPECT_EQ(read(nullptr).work_ps, 1'000'000'000) << "1 GB/s";
  cluster.tier_gb_per_s = 0.5;
  EXPECT_EQ(read(&table).work_ps, 2'000'000'000);
  EXPECT_EQ(read(&table).store_share, 0.25);
  cluster.tier_gb_per_s = 100;
  EXPECT_EQ(read(&table).work_ps, 500'000'000);
  cluster.tier_gb_per_s = 0;
  cluster.file_tier = false;
  EXPECT_EQ(read(&table).resource, Resource::kHostToDevice);
  EXPECT_EQ(read(&table).work_ps, 1'000'000);
}

// Four ranks on two cores, alone in a transfer: two processors are busy for all the work of four. With a core for each
// that work is hidden in the time measured.
TEST(CostModel, RanksThatShareCoresTakeAtLeastTheirWork) {
  Program program = ParseOrDie(kProgram);
  program.mesh = {{"dp", 4}};
  ClusterSpec cluster = Preset("local-4");
  cluster.cores = 2;
  ProfileTable table = *ParseProfile(
      "interlace-profile 2\ncollective gather ranks 4 bytes 0 us 100\ncollective gather ranks 4 bytes 1000 us 200\n"
      "core gather ranks 4 bytes 1000 us 150\n",
      "p");
  auto gather = [&] {
    return *CostModel::Create(program, cluster, &table)->CollectiveCost(Exchange::kGather, "dp", 1000, 1);
  };
  EXPECT_EQ(gather().latency_ps + gather().work_ps, 300'000'000);
  EXPECT_EQ(gather().core_share, 0.5);
  cluster.cores = 4;
  EXPECT_EQ(gather().latency_ps + gather().work_ps, 200'000'000);
  EXPECT_EQ(gather().core_share, 0.75);
}

// `interlace profile` measures messages among all ranks; stages of two ranks send them along another axis.
TEST(CostModel, AMessageTakesWhatWasMeasuredBetweenTwoOfAllRanks) {
  Program program = ParseOrDie(kProgram);
  program.mesh = {{"pp", 2}, {"dp", 2}};
  ClusterSpec cluster = Preset("local-4");
  const auto message = [&](const std::string& rows) {
    ProfileTable table = *ParseProfile("interlace-profile 2\n" + rows, "p");
    const OpCost cost =
        *CostModel::Create(program, cluster, &table)->CollectiveCost(Exchange::kPointToPoint, "pp", 1000, 1);
    return cost.latency_ps + cost.work_ps;
  };
  const std::string all = "collective p2p ranks 4 bytes 0 us 100\ncollective p2p ranks 4 bytes 1000 us 200\n";
  EXPECT_EQ(message(all), 200'000'000);
  EXPECT_EQ(message(all + "collective p2p ranks 2/2 bytes 1000 us 50\n"), 50'000'000);
  cluster.per_node = 2;
  EXPECT_NE(message(all), 200'000'000) << "the stages are on two hosts";
}

TEST(Profile, SweepsAreLines) {
  Sweep sweep;
  ASSERT_TRUE(sweep.Add(100, 10).ok() && sweep.Add(200, 12).ok() && sweep.Add(400, 30).ok());
  EXPECT_FALSE(sweep.Add(100, 11).ok());
  EXPECT_EQ(*sweep.Us(50), 10);
  EXPECT_EQ(*sweep.Us(150), 11);
  EXPECT_EQ(*sweep.Us(300), 21);
  EXPECT_EQ(*sweep.Us(800), 66);
  EXPECT_FALSE(Sweep().Us(1).has_value());
}

TEST(Profile, Errors) {
  auto error = [](std::string line) { return ErrorOf(ParseProfile("interlace-profile 1\n" + line + "\n", "p")); };
  EXPECT_EQ(error("opp 1"), "p:2:1: unknown line 'opp', did you mean 'op'?\n  opp 1\n  ^");
  EXPECT_EQ(error("op \"x\" us 0 bytes 1 transient 0 measured"),
            "p:2:11: a time must be above zero and below 1e12 us\n  op \"x\" us 0 bytes 1 transient 0 measured\n       "
            "     ^");
  EXPECT_NE(error("op \"x\" us 1 bytes 1 transient 0 maybe").find("expected 'measured' or 'estimated', found 'maybe'"),
            std::string::npos);
  EXPECT_NE(error("collective gathr ranks 2 bytes 1 us 1").find("did you mean 'gather'?"), std::string::npos);
  EXPECT_NE(error("copy h2d bytes -1 us 1").find("at least 0"), std::string::npos);
  EXPECT_NE(error("copy h2d bytes 1 us 1\ncopy h2d bytes 1 us 2").find("given twice"), std::string::npos);
  EXPECT_NE(error("core gathr ranks 2 bytes 1 us 1").find("did you mean 'gather'?"), std::string::npos);
  EXPECT_NE(error("finish reduce ranks 1 bytes 1 us 1").find("'ranks' must be at least 2"), std::string::npos);
  EXPECT_EQ(error("collective reduce ranks 1+2 bytes 1 us 1"), "no error") << "one shard on two replicas";
  EXPECT_NE(error("issue us 1\nissue us 2").find("given twice"), std::string::npos);
  EXPECT_NE(error("interference [1, 2]").find("expected 28 factors, found 2"), std::string::npos);
  EXPECT_EQ(error("together compute 1 h2d 1"),
            "p:2:1: a profile of version 1 has no pairs: the first line must say 2\n  together compute 1 h2d 1\n  ^");
  auto pair = [](std::string line) { return ErrorOf(ParseProfile("interlace-profile 2\ntogether " + line, "p")); };
  EXPECT_EQ(pair("file_write 1.5 compute 1"), "no error") << "either order";
  EXPECT_EQ(
      pair("compute 1.5 file_reed 1"),
      "p:2:22: unknown kind 'file_reed', did you mean 'file_read'?\n  together compute 1.5 file_reed 1\n           "
      "            ^");
  EXPECT_NE(pair("compute 1 compute 1").find("p:2:1: two kinds of work are needed, 'compute' is given for both"),
            std::string::npos);
  EXPECT_NE(pair("compute 0.5 h2d 1").find("p:2:18: a factor is a number from 1 to 1000"), std::string::npos);
  EXPECT_NE(pair("compute 1 h2d").find("expected a number, found"), std::string::npos);
  EXPECT_NE(pair("compute 1 h2d 1\ntogether h2d 1 compute 1").find("p:3:1: these two are given twice"),
            std::string::npos);
  EXPECT_NE(ErrorOf(ParseProfile("hello", "p")).find("not a profile"), std::string::npos);
  EXPECT_NE(ErrorOf(ParseProfile("interlace-profile 3", "p")).find("has version 3, this program reads 1 and 2"),
            std::string::npos);
}

}  // namespace
}  // namespace interlace
