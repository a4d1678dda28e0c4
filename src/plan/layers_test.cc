// The layers of captured models: reading their texts, and expressions of memory against counting one by one.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>

#include "cost/collective_model.h"
#include "ir/op_table.h"
#include "ir/text.h"
#include "passes/passes.h"
#include "passes/tensor/cutter.h"
#include "plan/captured_layers.h"
#include "plan/layer_memory.h"
#include "plan/model_text.h"
#include "plan/tensor_parallel.h"
#include "plan/testing/write_model.h"

namespace interlace::plan {
namespace {

std::string FileText(const std::string& name) {
  std::ifstream in(std::string(INTERLACE_SOURCE_DIR) + "/tests/models/" + name);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

ModelText ModelOf(const std::string& name) {
  Result<ModelText> model = ReadModelText(FileText(name), name);
  EXPECT_EQ(ErrorOf(model), "no error");
  return std::move(*model);
}

ClusterSpec ClusterOf(const std::string& name) {
  Result<ClusterSpec> cluster = LoadCluster(name, name);
  EXPECT_EQ(ErrorOf(cluster), "no error");
  return *cluster;
}

// Bytes of a bound program, op after op: a storage is there from its first write to its last touch.
struct Counted {
  int64_t saved = 0, forward = 0, backward = 0;
};

Counted CountOneByOne(const Program& program) {
  const Phase& phase = *program.FindPhase("micro_batch");
  std::map<ValueId, int> last;
  std::set<ValueId> gradients;
  ValueId hidden = kNone, hidden_grad = kNone;
  for (const Input& input : program.inputs) {
    if (input.name == "hidden") hidden = input.value;
    if (input.name == "hidden.grad") hidden_grad = input.value;
  }
  int count = static_cast<int>(phase.ops.size()), middle = 0;
  while (program.op(phase.ops[middle]).part != Part::kBackward) ++middle;
  for (int i = 0; i < count; ++i) {
    const Op& op = program.op(phase.ops[i]);
    for (ValueId id : op.results) {
      if (id != kNone) last[program.RootOf(id)] = i;
    }
    ForEachOperand(op, [&](ValueId id) { last[program.RootOf(id)] = i; });
    if (op.name == "grad") gradients.insert(program.RootOf(op.args[1].value));
    if (op.name == "output") last[program.RootOf(op.args[0].value)] = i < middle ? middle - 1 : count - 1;
  }
  std::map<ValueId, int64_t> alive;
  auto begin = [&](ValueId id) { alive[id] = *program.StorageBytes(program.value(id).type); };
  auto total = [&] {
    int64_t sum = 0;
    for (const auto& [id, bytes] : alive) sum += bytes;
    return sum;
  };
  Counted out;
  if (hidden != kNone) begin(hidden);
  for (int i = 0; i < count; ++i) {
    if (i == middle) {
      out.saved = total();
      if (hidden_grad != kNone) begin(hidden_grad);
    }
    const Op& op = program.op(phase.ops[i]);
    for (ValueId id : op.results) {
      if (id != kNone && program.RootOf(id) == id && gradients.count(id) == 0) begin(id);
    }
    int64_t& peak = i < middle ? out.forward : out.backward;
    peak = std::max(peak, total());
    std::erase_if(alive, [&](const auto& entry) { return last[entry.first] <= i; });
  }
  return out;
}

TEST(Layers, MemoryExpressionsEqualCountingOneByOne) {
  std::mt19937 random(7);
  for (const char* file : {"llama.model", "llama-eager.model", "gpt2.model", "mixtral.model"}) {
    ModelText model = ModelOf(file);
    for (Program& captured : model.programs) {
      ASSERT_TRUE(Canonicalize(captured).ok());
      for (const char* mode : {"", "selective", "full"}) {
        for (bool cut : {false, true}) {
          Program program = captured.Clone();
          if (*mode != 0 && *captured.Meta("layer") != "block") continue;
          SCOPED_TRACE(std::string(file) + " " + *captured.Meta("layer") + " " + mode + (cut ? " cut" : ""));
          if (*mode != 0) {
            ASSERT_EQ(ErrorOf(Recompute(program, {{"mode", mode}})), "no error");
          }
          if (cut) {
            ASSERT_EQ(ErrorOf(CutForTensorParallel(program, model)), "no error");
          }
          Result<LayerMemory> memory = MemoryOfLayer(program);
          ASSERT_EQ(ErrorOf(memory), "no error");
          for (int trial = 0; trial < 6; ++trial) {
            const int64_t tp = cut ? 1 + random() % 2 * 3 : 1;  // 1 or 4
            Binding binding{{"b", 2 + random() % 40}, {"s", tp * (2 + random() % 120)}};
            if (cut) binding = BindingOf(model, binding["b"], binding["s"], tp);
            Result<Program> bound = Bind(program, binding);
            ASSERT_EQ(ErrorOf(bound), "no error");
            Counted counted = CountOneByOne(*bound);
            EXPECT_EQ(*program.dims.Evaluate(memory->saved, binding), counted.saved);
            EXPECT_EQ(*Largest(program.dims, memory->forward, binding), counted.forward);
            EXPECT_EQ(*Largest(program.dims, memory->backward, binding), counted.backward);
          }
        }
      }
    }
  }
}

// The names of the ops that compute, and the bytes of their results at a binding; those along a cut sequence apart.
struct OpBytes {
  std::string name;
  int64_t bytes = 0;
  bool cut_sequence = false;
};

std::vector<OpBytes> BytesOfOps(const Program& program, const Binding& binding) {
  std::vector<OpBytes> out;
  Result<Program> bound = Bind(program, binding);
  EXPECT_EQ(ErrorOf(bound), "no error");
  for (OpId id : program.FindPhase("micro_batch")->ops) {
    const Op& op = program.op(id);
    // A copy is a rank's part of what is whole.
    const bool computes =
        op.kind != OpKind::kView && op.kind != OpKind::kCopy && TraitsOf(op).family != OpFamily::kCollective;
    if (!computes || op.results.empty()) continue;
    OpBytes entry{op.name, 0, false};
    for (ValueId result : op.results) {
      if (result == kNone) continue;
      entry.bytes += *bound->StorageBytes(bound->value(result).type);
      entry.cut_sequence =
          entry.cut_sequence || PrintType(program, program.value(result).type).find("s//tp") != std::string::npos;
    }
    out.push_back(entry);
  }
  return out;
}

TEST(Layers, CutForTwoRanksIsTheModelOfHalfTheHeadsAndWidths) {
  for (auto [whole_file, half_file] : {std::pair("llama.model", "llama-half.model"),
                                       {"llama-eager.model", "llama-eager-half.model"},
                                       {"mixtral.model", "mixtral-half.model"}}) {
    ModelText whole = ModelOf(whole_file), half = ModelOf(half_file);
    EXPECT_EQ(LargestTensorParallel(whole), 4);
    for (int role = 0; role < kRoles; ++role) {
      SCOPED_TRACE(std::string(whole_file) + " " + std::string(RoleName(static_cast<Role>(role))));
      Program& cut = whole.programs[role];
      ASSERT_TRUE(Canonicalize(cut).ok() && Canonicalize(half.programs[role]).ok());
      ASSERT_EQ(ErrorOf(CutForTensorParallel(cut, whole)), "no error");
      auto found = BytesOfOps(cut, BindingOf(whole, 4, 96, 2)),
           wanted = BytesOfOps(half.programs[role], {{"b", 4}, {"s", 96}});
      if (role !=
          static_cast<int>(Role::kBlock)) {  // a vocabulary that is cut takes ops of its own, on no whole logits
        auto less = [](const OpBytes& a, const OpBytes& b) { return a.bytes < b.bytes; };
        EXPECT_EQ(std::max_element(found.begin(), found.end(), less)->bytes,
                  std::max_element(wanted.begin(), wanted.end(), less)->bytes);
        continue;
      }
      ASSERT_EQ(found.size(), wanted.size());
      int whole_sequence = 0;
      for (size_t i = 0; i < found.size(); ++i) {
        ASSERT_EQ(found[i].name, wanted[i].name);
        EXPECT_EQ(found[i].bytes * (found[i].cut_sequence ? 2 : 1), wanted[i].bytes) << i << " " << found[i].name;
        whole_sequence += !found[i].cut_sequence && found[i].bytes > 4 * 96;
      }
      EXPECT_GT(whole_sequence, 0);
    }
  }
}

// Megatron-LM's figures for a block with sequence parallelism: what is saved, and the bytes that collectives move.
TEST(Layers, TensorParallelDividesWhatABlockSavesAndGathersWhatItNeeds) {
  ClusterSpec cluster = ClusterOf("a100-40gb-2");
  auto layers = ReadLayers(FileText("llama.model"), "llama.model", cluster, 64);
  ASSERT_EQ(ErrorOf(layers), "no error");
  EXPECT_EQ((*layers)->largest_tp(), 4);
  ASSERT_EQ(ErrorOf((*layers)->Cost(Role::kBlock, 2, 2)), "no error");
  LayerCost one = *(*layers)->Cost(Role::kBlock, 2, 1), two = *(*layers)->Cost(Role::kBlock, 2, 2);
  EXPECT_EQ(two.saved_kept * 2, one.saved_kept);
  EXPECT_EQ(two.saved_full * 2, one.saved_full);
  EXPECT_EQ(two.boundary * 2, one.boundary);
  EXPECT_EQ(two.parameters, (one.parameters - 2 * 128) / 2 + 2 * 128);  // norms are whole
  EXPECT_EQ(one.tp_forward_us, 0);
  // Forward: gather, scatter twice. Backward: the same, what the weights' gradients read is gathered again, and the
  // gradients of both norms' weights are summed at once.
  auto ring = [&](Exchange kind, double bytes = 2 * 64 * 128 * 4) {
    CollectiveTime time = RingTime(cluster, GroupShapeOf({{"tp", 2}}, "tp", cluster.per_node), kind, bytes, 1);
    return time.latency_us + time.transfer_us;
  };
  const double gather = ring(Exchange::kGather), scatter = ring(Exchange::kReduce);
  EXPECT_NEAR(two.tp_forward_us, 2 * gather + 2 * scatter, 1e-6);
  EXPECT_NEAR(two.tp_backward_us, 4 * gather + 2 * scatter + ring(Exchange::kAllReduce, 2 * 128 * 4), 1e-6);
  // GPT-2: products with biases, one for queries, keys and values.
  layers = ReadLayers(FileText("gpt2.model"), "gpt2.model", cluster, 64);
  ASSERT_EQ(ErrorOf(layers), "no error");
  ASSERT_EQ(ErrorOf((*layers)->Cost(Role::kBlock, 2, 4)), "no error");
  LayerCost four = *(*layers)->Cost(Role::kBlock, 2, 4);
  one = *(*layers)->Cost(Role::kBlock, 2, 1);
  EXPECT_EQ((*layers)->Cost(Role::kHead, 2, 1)->tied, 512 * 96);
  EXPECT_EQ((*layers)->Cost(Role::kHead, 2, 4)->tied, 512 * 96 / 4);
  EXPECT_EQ(four.saved_kept * 4, one.saved_kept);
  EXPECT_EQ(four.parameters,
            12 * 96 * 96 / 4 + 7 * 96 / 4 + 6 * 96);  // weights; biases of columns; norms, biases of rows
}

// What is decided with sizes and ranks open is what is decided with all of them known.
TEST(Layers, CutWithSymbolsAndThenBoundIsBoundAndThenCut) {
  for (const char* file : {"llama.model", "llama-eager.model", "gpt2.model", "mixtral.model"}) {
    ModelText model = ModelOf(file);
    for (Program& captured : model.programs) {
      SCOPED_TRACE(std::string(file) + " " + *captured.Meta("layer"));
      ASSERT_TRUE(Canonicalize(captured).ok());
      Program open = captured.Clone();
      ASSERT_EQ(ErrorOf(CutForTensorParallel(open, model)), "no error");
      const Result<Program> bound = Bind(open, BindingOf(model, 3, 96, 2));
      ASSERT_EQ(ErrorOf(bound), "no error");
      Result<Program> number = Bind(captured, {{"b", 3}, {"s", 96}});
      ASSERT_EQ(ErrorOf(number), "no error");
      number->mesh = {{"tp", 2}};
      tensor::Cutter cutter(*number, *number->MicroBatchPhase(), {.axis = "tp", .regather = true});
      for (Param& param : number->params) {
        for (const ParallelParameter& cut : model.parallel) {
          if (cut.name != param.name) continue;
          ASSERT_EQ(ErrorOf(cutter.CutParam(param, cut.dim, cut.blocks)), "no error");
        }
      }
      ASSERT_EQ(ErrorOf(cutter.CutActivation("hidden", 1)), "no error");
      ASSERT_EQ(ErrorOf(cutter.CutActivation("hidden.grad", 1)), "no error");
      ASSERT_EQ(ErrorOf(cutter.Run()), "no error");
      number->Compact();
      Result<Program> first = Bind(*number, {{"rank_tp", 0}});
      ASSERT_EQ(ErrorOf(first), "no error");
      first->mesh.clear();
      EXPECT_EQ(Print(*bound), Print(*first));
    }
  }
}

TEST(Layers, AVocabularyThatRanksDoNotDivideIsPadded) {
  std::string text = FileText("gpt2.model");
  for (size_t at = 0; (at = text.find("512", at)) != std::string::npos;) text.replace(at, 3, "511");
  auto layers = ReadLayers(text, "m", ClusterOf("a100-40gb-2"), 64);
  ASSERT_EQ(ErrorOf(layers), "no error");
  EXPECT_EQ((*layers)->largest_tp(), 4);
  for (int32_t tp : {1, 2, 4}) {
    const Result<LayerCost> head = (*layers)->Cost(Role::kHead, 2, tp);
    ASSERT_EQ(ErrorOf(head), "no error");
    EXPECT_EQ(head->tied, 511 / tp * 96);
    EXPECT_EQ(ErrorOf((*layers)->Cost(Role::kEmbedding, 2, tp)), "no error");
  }
}

TEST(Layers, UnevenTensorParallelIsNamed) {
  auto layers = ReadLayers(FileText("llama.model"), "llama.model", ClusterOf("a100-40gb-2"), 66);
  ASSERT_EQ(ErrorOf(layers), "no error");
  EXPECT_EQ((*layers)->largest_tp(), 2);
  EXPECT_EQ(ErrorOf((*layers)->Cost(Role::kBlock, 2, 4)),
            "tensor parallel over 4 devices does not divide the model's heads and widths and the sequence of 66; "
            "divisors of 2 do");
}

// Llama in miniature: hidden 128, 8 heads of 16, 4 of keys and values, MLP 344, float32, flash attention.
TEST(Layers, SavedBytesOfABlockByHand) {
  auto layers = ReadLayers(FileText("llama.model"), "llama.model", ClusterOf("a100-40gb-2"), 64);
  ASSERT_EQ(ErrorOf(layers), "no error");
  ASSERT_EQ(ErrorOf((*layers)->Cost(Role::kBlock, 2, 1)), "no error");
  LayerCost block = *(*layers)->Cost(Role::kBlock, 2, 1);
  const int64_t rows = 2 * 64;  // b * s
  EXPECT_EQ(block.boundary, rows * 128 * 4);
  EXPECT_EQ(block.saved_full, block.boundary);
  EXPECT_EQ(block.parameters, 2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 344 + 2 * 128);
  EXPECT_EQ(block.largest_unit, block.parameters);
  // Two norms: their input, its inverse root and both products; q, k after rotation, v; attention and its sums; MLP:
  // gate, silu, up and product.
  const int64_t norm = 128 + 1 + 128 + 128;
  EXPECT_EQ(block.saved_kept, rows * 4 * (2 * norm + (128 + 64 + 64) + (128 + 8) + 4 * 344));
  EXPECT_LT(block.saved_selective, block.saved_kept);
  EXPECT_LT(block.saved_full, block.saved_selective);
  EXPECT_GT(block.recompute_full_us, block.recompute_selective_us);
  EXPECT_LT(block.recompute_full_us, 1.01 * block.forward_us);
  EXPECT_GT(block.backward_us, block.forward_us);
}

// This runtime on an accelerator: regions keep of a norm its input, inverse root and what products read, of the MLP not
// silu, which is made again of the gate; and what they read and write together they read and write once.
TEST(Layers, SavedBytesOfRegionsByHand) {
  auto layers = ReadLayers(FileText("llama.model"), "llama.model", ClusterOf("h100-80gb-2:ours"), 64);
  ASSERT_EQ(ErrorOf(layers), "no error");
  const LayerCost block = *(*layers)->Cost(Role::kBlock, 2, 1);
  const int64_t rows = 2 * 64, norm = 128 + 1 + 128;
  EXPECT_EQ(block.saved_kept, rows * 4 * (2 * norm + (128 + 64 + 64) + (128 + 8) + 3 * 344));
  (*layers)->MoveTo(ClusterOf("h100-80gb-2:eager"));
  const LayerCost eager = *(*layers)->Cost(Role::kBlock, 2, 1);
  EXPECT_EQ(eager.saved_kept, block.saved_kept + rows * 4 * (2 * 128 + 344));
  EXPECT_LT(block.backward_us, eager.backward_us);
  (*layers)->MoveTo(ClusterOf("h100-80gb-2:ours"));  // both are known now
  EXPECT_EQ((*layers)->Cost(Role::kBlock, 2, 1)->saved_kept, block.saved_kept);
}

TEST(Layers, TextsAreReadAsTheyAreWritten) {
  for (const char* file : {"llama.model", "gpt2.model"}) {
    std::string written = WriteModelText(ModelOf(file));
    Result<ModelText> again = ReadModelText(written, file);
    ASSERT_EQ(ErrorOf(again), "no error");
    EXPECT_EQ(WriteModelText(*again), written);
  }
}

TEST(Layers, WrongTextsAreNamed) {
  const std::string good = FileText("llama.model");
  auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    return ErrorOf(ReadModelText(text, "m"));
  };
  EXPECT_EQ(
      with("interlace-model 1", "interlace-model 2"),
      "m:1:18: the model has version 2, this program reads 1; read it with a newer release\n  interlace-model 2\n "
      "                  ^");
  EXPECT_EQ(with("blocks 4", "block 4"), "m:4:1: unknown key 'block', did you mean 'blocks'?\n  block 4\n  ^");
  EXPECT_EQ(with("blocks 4", "blocks 0"), "m:4:8: this number must be from 1 to 100000\n  blocks 0\n         ^");
  EXPECT_EQ(with("heads 8", "hidden 8"), "m:7:1: 'hidden' is given twice\n  hidden 8\n  ^");
  EXPECT_EQ(with("parallel column", "parallel columns"),
            "m:13:10: unknown kind 'columns', did you mean 'column'?\n  parallel columns 0 "
            "\"model.layers.0.self_attn.q_proj.weight\"\n           ^");
  EXPECT_NE(
      with(",128] \"hidden\"", ",128] \"hiden\"").find("no input \"hidden\", the activation that enters the layer"),
      std::string::npos);
  EXPECT_NE(ErrorOf(ReadModelText(good.substr(0, good.size() - 30), "m")).find("the file ends after "),
            std::string::npos);
  EXPECT_NE(with("parallel column 0", "parallel column 0 block 3").find("unknown word 'block', did you mean 'blocks'?"),
            std::string::npos);
  // Cut anywhere, a text is refused and nothing worse.
  for (size_t cut = 0; cut < good.size(); cut += 997)
    EXPECT_NE(ErrorOf(ReadModelText(good.substr(0, cut), "m")), "no error");
}

// What the runtime holds of a layer (run_layer.h). That it is what the runtime's allocator shows is checked on ranks,
// by tests/python/test_plan.py and bench/plan_memory.py.
TEST(Layers, AsTheRuntimeTrainsThem) {
  for (const char* name : {"llama.model", "gpt2.model"}) {
    SCOPED_TRACE(name);
    auto source = ReadLayers(FileText(name), name, ClusterOf("local-2"), 128);
    ASSERT_EQ(ErrorOf(source), "no error");
    const LayerSource& layers = **source;
    for (Role role : {Role::kEmbedding, Role::kBlock, Role::kHead}) {
      SCOPED_TRACE(RoleName(role));
      const LayerCost cost = *layers.Cost(role, 2, 1);
      const RunCost alone = *layers.AsRun(role, 2, {.dp = 1, .zero = 0});
      const int64_t own = cost.parameters - cost.tied;
      EXPECT_EQ(alone.weights, alone.gradients);
      EXPECT_GE(alone.weights, own);  // parameters begin at multiples of 32
      EXPECT_LE(alone.weights, own + 32 * alone.units);
      EXPECT_GE(alone.work_backward, cost.work_backward);
      for (int32_t dp : {2, 4}) {
        for (bool accumulates : {false, true}) {
          int64_t held[4], work[4];
          for (int32_t zero = 0; zero <= 3; ++zero) {
            const RunCost run = *layers.AsRun(role, 2, {dp, zero, accumulates});
            const int64_t whole = run.weights * (zero == 3 ? dp : 1);
            EXPECT_GE(whole, own);
            EXPECT_LE(whole, own + 32 * dp * run.units);
            EXPECT_EQ(run.states * (zero >= 1 ? dp : 1), whole);
            // Replicated: sums and what is gathered of them. ZeRO 1 adds up whole gradients beside the reduced shard.
            const int64_t shard = whole / dp;
            EXPECT_EQ(run.gradients, zero == 0                  ? (accumulates ? 2 : 1) * whole
                                     : zero == 1 && accumulates ? whole + shard
                                                                : shard)
                << zero;
            held[zero] = run.weights + run.gradients, work[zero] = run.work_backward;
          }
          EXPECT_LE(held[3], held[2]);
          EXPECT_LE(held[2], held[1]);
          if (accumulates) {
            EXPECT_LE(held[1], held[0]);
          }
          // In flight: a gradient that is being made and one that is reduced and received, then parameters too.
          EXPECT_GE(work[2], alone.work_backward);
          EXPECT_GE(work[3], work[2]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace interlace::plan
