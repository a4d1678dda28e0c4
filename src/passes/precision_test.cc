#include <random>

#include "base/testing/rounds.h"
#include "ir/testing/interpreter.h"
#include "ir/testing/random_program.h"
#include "passes/inspect.h"
#include "passes/pass_test_support.h"
#include "passes/passes.h"

namespace interlace {
namespace {

using testing::FirstDifference;
using testing::Interpret;
using testing::InterpretOptions;
using testing::RunResult;

// tests/golden/passes/mixed.il: a linear layer whose parameters are used as bf16 alone, and a norm in f32.
class PrecisionGolden : public ::testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(PrecisionGolden, TextIsAsReviewed) {
  ExpectGolden(GetParam().first, RunText(GoldenInput("mixed.il"), GetParam().second));
}

INSTANTIATE_TEST_SUITE_P(
    Files, PrecisionGolden,
    ::testing::Values(
        std::pair{"mixed.precision.il", "precision(param=bf16,reduce=bf16)"},
        std::pair{"mixed.shard2.il", "precision(param=auto,reduce=bf16),shard(ranks=2),update(clip=1.0)"},
        std::pair{"mixed.shard1.il", "precision(param=bf16,reduce=bf16),shard(ranks=1),update"},
        std::pair{"mixed.zero1.il", "precision(param=bf16),zero1(ranks=2),update"},
        std::pair{"mixed.shard2_each.il",
                  "precision(param=bf16,reduce=bf16),shard(ranks=2),accumulate(steps=2),update"},
        std::pair{"mixed.shard2_last.il",
                  "precision(param=bf16,reduce=bf16),shard(ranks=2),accumulate(steps=2,mode=reduce_last),update"}),
    [](const auto& info) {
      std::string name = info.param.first;
      for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
      return name;
    });

ProgramSummary SummaryOf(const std::string& pipeline) {
  Result<Program> program = Parse(RunText(GoldenInput("mixed.il"), pipeline), "test");
  EXPECT_TRUE(program.ok());
  return Summarize(*program);
}

TEST(Precision, HalfTheBytesTravel) {
  // Units of 64 elements: two gathered in forward (a.weight, a.bias), one in backward too, norm.weight twice in f32.
  ProgramSummary wide = SummaryOf("shard(ranks=2)");
  ProgramSummary narrow = SummaryOf("precision(param=bf16,reduce=bf16),shard(ranks=2)");
  EXPECT_EQ(wide.reduced_bytes, 3 * 32 * 4);
  EXPECT_EQ(narrow.reduced_bytes, 3 * 32 * 2);
  EXPECT_EQ(wide.gathered_bytes,
            4 * 32 * 4);  // the casts of forward are kept for backward, so nothing is gathered again
  EXPECT_EQ(narrow.gathered_bytes, (3 * 2 + 2 * 4) * 32);
}

TEST(Precision, TwiceChangesNothing) {
  std::string once = RunText(GoldenInput("mixed.il"), "precision(param=bf16,reduce=bf16)");
  EXPECT_EQ(RunText(once, "precision(param=bf16,reduce=bf16)"), once);
  Result<Program> program = Parse(GoldenInput("mixed.il"), "test");
  Result<bool> changed = Precision(*program);
  ASSERT_TRUE(changed.ok());
  EXPECT_FALSE(*changed);
}

TEST(Precision, AParameterUsedAsItIsKeepsItsWideGather) {
  std::string text = GoldenInput("mixed.il");
  // The bias is used once more, in f32.
  size_t at = text.find("  %16: f32[]");
  text.insert(at, "  %40: f32[2,8] = aten.add.Tensor(%15, %1) {fwd}\n");
  text.replace(text.find("aten.sum(%15)"), 13, "aten.sum(%40)");
  std::string out = RunText(text, "precision(param=bf16),shard(ranks=2)");
  EXPECT_NE(out.find("f32[64] = gather.start(%5) {fwd units=[u1]}"), std::string::npos) << out;
  EXPECT_EQ(out.find("bf16[32] = copy(%5)"), std::string::npos) << out;
  EXPECT_NE(out.find("bf16[32] = copy(%4)"), std::string::npos) << out;
}

TEST(Precision, SaysWhatIsWrong) {
  std::string text = GoldenInput("mixed.il");
  EXPECT_EQ(RunText(text, "shard(ranks=2),precision(param=bf16)"),
            "error: pass 'precision': the program has units already (shard, replicate or zero1 has run); "
            "precision takes a captured one");
  EXPECT_EQ(
      RunText(text, "precision(param=f16)"),
      "error: pass 'precision': no parameter is used only through casts to f16, so none can be gathered in it; capture "
      "with Config(param_dtype=...) or under torch.autocast");
  EXPECT_EQ(RunText(text, "precision(reduce=bf61)"),
            "error: pass 'precision': option reduce=bf61: expected none or f32 or bf16 or f16, did you mean 'bf16'?");
}

TEST(Precision, MarksAreChecked) {
  std::string text = GoldenInput("mixed.il");
  std::string wrong = text;
  wrong.replace(wrong.find("aten._to_copy(%13, dtype=f32) {fwd}"), 35,
                "aten._to_copy(%13, dtype=f32) {fwd on_shard=true}");
  Result<Program> program = Parse(wrong, "test");
  ASSERT_TRUE(program.ok());
  Result<std::vector<PassReport>> reports = RunPasses(*program, {});
  ASSERT_FALSE(reports.ok());
  EXPECT_NE(reports.error().message.find(
                "on_shard needs an aten._to_copy of a whole parameter that keeps its sizes and strides"),
            std::string::npos)
      << reports.error().message;
}

// The message of the verifier on a text.
std::string Complaint(const std::string& text) {
  Result<Program> program = Parse(text, "test");
  if (!program.ok()) return program.error().ToString();
  Result<std::vector<PassReport>> reports = RunPasses(*program, {});
  return reports.ok() ? "" : reports.error().message;
}

TEST(Precision, GradientsMayBeNarrowerButNotWider) {
  std::string text = RunText(GoldenInput("mixed.il"), "precision(param=bf16,reduce=bf16)");
  EXPECT_EQ(Complaint(text), "");
  std::string wide = text;
  size_t param = wide.find("param %2: f32[8]");
  wide.replace(param, 16, "param %2: bf16[8]");
  wide.replace(wide.find("%15: bf16[8] = aten._to_copy(%14, dtype=bf16)"), 45,
               "%15: f32[8] = aten._to_copy(%14, dtype=f32)");
  EXPECT_NE(Complaint(wide).find("the gradient of 'norm.weight' must be bf16[8], or narrower, not f32[8]"),
            std::string::npos)
      << Complaint(wide);
}

TEST(Precision, TheLossScaleIsDividedOut) {
  std::string text = GoldenInput("mixed.il");
  text.insert(text.find("input %3"), "buffer %50: f32[] \"interlace.loss_scale\" plain\n");
  for (const char* clip : {"none", "1.0"}) {
    std::string out = RunText(text, std::string("precision(param=bf16),shard(ranks=2),update(clip=") + clip + ")");
    size_t coef = out.find("norm.coef(");
    ASSERT_NE(coef, std::string::npos) << out;
    EXPECT_EQ(out.substr(out.find(", ", coef), 5), ", %3)") << out;  // the buffer
    out.replace(out.find(", %3)", coef), 5, ", %5)");
    EXPECT_NE(Complaint(out).find("%5 must have 1 element (what the loss was multiplied by)"), std::string::npos)
        << Complaint(out);
  }
}

// A random program whose parameters are used as bf16, all or most of them, and whose gradients come back through bf16.
Program RandomMixed(uint64_t seed, std::mt19937_64& random) {
  Program program = testing::RandomProgram({.seed = seed, .layers = 1 + static_cast<int>(seed % 5)});
  Phase& phase = *program.FindPhase("micro_batch");
  auto cast = [&](ValueId from, DType dtype, Part part) {
    Op& op = program.AddOp("aten._to_copy");
    op.part = part;
    op.args = {Arg::Of(from)};
    op.named = {{"dtype", Arg::Word(std::string(DTypeName(dtype)))}};
    Type type = program.value(from).type;
    type.dtype = dtype;
    return program.AddResult(op, std::move(type));
  };
  std::vector<OpId> casts;
  for (const Param& param : program.params) {
    if (random() % 4 == 0) continue;
    ValueId narrow = cast(param.value, DType::kBF16, Part::kForward);
    casts.push_back(program.value(narrow).def);
    ReplaceUses(program, phase, param.value, narrow);
    program.op(casts.back()).args = {Arg::Of(param.value)};
    for (ValueId id = 0; id < program.num_values(); ++id) {
      if (!program.HasValue(id) || id == param.value || program.RootOf(id) != param.value) continue;
      program.value(id).root = narrow;
      program.value(id).type.dtype = DType::kBF16;
    }
    for (OpId id : phase.ops) {
      Op& op = program.op(id);
      if (op.name == "grad" && op.args[0].value == narrow) op.args[0].value = param.value;
    }
  }
  std::vector<OpId> ops = casts;
  for (OpId id : phase.ops) {
    Op& op = program.op(id);
    if (op.name == "grad" && (random() % 2 || program.value(op.args[1].value).type.dtype == DType::kBF16)) {
      ValueId value = op.args[1].value;
      if (program.value(value).type.dtype != DType::kBF16) {
        value = cast(value, DType::kBF16, Part::kBackward);
        ops.push_back(program.value(value).def);
      }
      value = cast(value, DType::kF32, Part::kBackward);
      ops.push_back(program.value(value).def);
      program.op(id).args[1].value = value;
    }
    ops.push_back(id);
  }
  phase.ops = std::move(ops);
  return program;
}

void ApplyCasts(Program& program, const std::string& pipeline) {
  Result<std::vector<PassCall>> calls = ParsePipeline(pipeline);
  ASSERT_TRUE(calls.ok()) << calls.error().ToString();
  Result<std::vector<PassReport>> reports = RunPasses(program, *calls);
  ASSERT_TRUE(reports.ok()) << reports.error().ToString() << "\n" << Print(program);
}

class PrecisionProperty : public ::testing::TestWithParam<int> {};

// Moving casts onto shards changes no bit; a gradient reduced in bf16 has the bits of the textbook's.
TEST_P(PrecisionProperty, SameBitsAsTheTextbookStep) {
  for (int i = 0; i < 12; ++i) {
    auto seed = static_cast<uint64_t>(GetParam() * 12 + i);
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    InterpretOptions run;
    run.ranks = 1 + static_cast<int64_t>(seed % 4);
    run.accumulation = 1 + static_cast<int64_t>(random() % 3);
    run.accumulate_mode = random() % 2 ? "reduce_each" : "reduce_last";
    if (random() % 2) run.clip = 1.0;
    Program captured = RandomMixed(seed, random);
    std::string reduce = random() % 3 ? "reduce=bf16" : "reduce=none";
    // Parameters may all be unused, or used by a program that casts none.
    Program marked = captured.Clone();
    ApplyCasts(marked, "canonicalize");
    std::string param = Precision(marked, {{"param", "auto"}}).ok() ? "auto" : "none";
    Program expected = captured.Clone();
    ApplyCasts(expected, "precision(" + reduce + ")");
    Result<RunResult> wanted = Interpret(expected, run);
    ASSERT_TRUE(wanted.ok()) << wanted.error().ToString();
    for (const char* sharding : {"shard", "replicate", "zero1"}) {
      std::string pipeline = std::string(random() % 2 ? "canonicalize," : "") + "precision(param=" + param + "," +
                             reduce + ")," + sharding + "(ranks=" + std::to_string(run.ranks) +
                             (random() % 2 ? ",wait=now" : "") +
                             "),accumulate(steps=" + std::to_string(run.accumulation) + ",mode=" + run.accumulate_mode +
                             "),update" + (run.clip ? "(clip=1.0)" : "") + (random() % 2 ? ",canonicalize" : "");
      SCOPED_TRACE(pipeline);
      Program program = captured.Clone();
      ApplyCasts(program, pipeline);
      if (HasFailure()) return;
      Result<RunResult> actual = Interpret(program, run);
      ASSERT_TRUE(actual.ok()) << actual.error().ToString() << "\n" << Print(program);
      EXPECT_EQ(FirstDifference(*wanted, *actual), "") << Print(program);
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, PrecisionProperty, ::testing::Range(0, Rounds(4)));

}  // namespace
}  // namespace interlace
