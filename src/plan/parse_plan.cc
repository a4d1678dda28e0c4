#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/scan.h"
#include "base/suggest.h"
#include "plan/plan_text.h"

namespace interlace::plan {
namespace {

constexpr int64_t kMostStages = 4096;
constexpr int64_t kMostCount = int64_t{1} << 31;  // of blocks, devices, samples of a micro-batch

// A line's words after its first: names with a number each.
struct Number {
  std::string_view name;
  double* real = nullptr;
  float* share = nullptr;
  int32_t* count = nullptr;
  int64_t* size = nullptr;
};

class PlanReader {
 public:
  PlanReader(std::string_view text, std::string_view file) : in_(text, file) {}

  Result<PlanFile> Run() {
    in_.SkipToContent();
    if (in_.text().substr(std::min(in_.pos(), in_.text().size()), kPlanMagic.size()) != kPlanMagic) {
      return in_.ErrorHere("not a plan: the first line must be 'interlace-plan 1'");
    }
    in_.Seek(in_.pos() + kPlanMagic.size());
    in_.SkipBlanks();
    INTERLACE_ASSIGN(int64_t version, in_.Int());
    if (version != kPlanVersion) {
      return in_.ErrorHere("the plan has version " + std::to_string(version) + ", this program reads 1; plan again");
    }
    INTERLACE_TRY(LineEnd());
    for (in_.SkipToContent(); !in_.AtEnd(); in_.SkipToContent()) {
      begin_ = in_.pos();
      std::string_view word = in_.Word();
      in_.SkipBlanks();
      if (word == "stage") {
        INTERLACE_TRY(Missing());
        INTERLACE_TRY(StageLine());
      } else if (stages_ == 0) {
        INTERLACE_TRY(HeadLine(word));
      } else {
        INTERLACE_TRY(StagePart(word));
      }
      INTERLACE_TRY(LineEnd());
    }
    INTERLACE_TRY(Missing());
    if (stages_ == 0) return in_.ErrorHere("the plan has no stage");
    Derive();
    return std::move(out_);
  }

 private:
  Status HeadLine(std::string_view word) {
    Plan& plan = out_.plan;
    INTERLACE_TRY(Once(word, {"model", "cluster", "devices", "blocks", "global_batch", "sequence", "flash_attention",
                              "memory_limit", "template", "accumulation", "space", "dtype", "predicted"}));
    if (word == "model") return Text(plan.model);
    if (word == "cluster") return Text(plan.cluster);
    if (word == "space") return Text(plan.space);
    if (word == "dtype") return Text(out_.dtype);
    if (word == "blocks") return Whole(out_.blocks, 1, kMostCount);
    if (word == "global_batch") return Whole(plan.global_batch, 1, int64_t{1} << 40);
    if (word == "sequence") return Whole(plan.sequence, 1, int64_t{1} << 40);
    if (word == "memory_limit") return Whole(out_.memory_limit, 0, int64_t{1} << 62);
    if (word == "accumulation") return Whole(accumulation_, 1, kMostCount - 1);
    if (word == "flash_attention") {
      plan.flash_attention = in_.EatWord("yes");
      if (!plan.flash_attention && !in_.EatWord("no")) return in_.ErrorHere("expected yes or no, found " + in_.Found());
      return Ok{};
    }
    if (word == "template") {
      out_.as_run = in_.EatWord("runtime");
      if (!out_.as_run && !in_.EatWord("overlap"))
        return in_.ErrorHere("expected overlap or runtime, found " + in_.Found());
      return Ok{};
    }
    if (word == "devices") {
      INTERLACE_TRY(Whole(out_.devices, 1, kMostCount));
      in_.SkipBlanks();
      if (!in_.EatWord("per_node")) return in_.ErrorHere("expected 'per_node', found " + in_.Found());
      in_.SkipBlanks();
      return Whole(out_.per_node, 1, kMostCount);
    }
    return Numbers({{"step_us", &plan.step_us}, {"pipeline_us", &plan.pipeline_us}, {"bound_us", &plan.bound_us}});
  }

  Status StageLine() {
    INTERLACE_ASSIGN(int64_t number, in_.Int());
    if (number != stages_) {
      return in_.ErrorAt(begin_, "stages stand in order: this one must be 'stage " + std::to_string(stages_) + "'");
    }
    if (stages_ == kMostStages) return in_.ErrorAt(begin_, "more than 4096 stages");
    ++stages_;
    out_.plan.stages.emplace_back();
    out_.places.push_back({LineOf(begin_), 0});
    stage_begin_ = begin_;
    return Ok{};
  }

  Status StagePart(std::string_view word) {
    PlanStage& stage = out_.plan.stages.back();
    Strategy& s = stage.strategy;
    if (word == "predicted") {
      if (StandsHere("t_us")) {
        INTERLACE_TRY(Once("predicted t_us", {"predicted t_us"}));
        return Numbers({{"t_us", &stage.cost.stable_us},
                        {"d_us", &stage.cost.extra_us},
                        {"forward_us", &stage.passes.forward_us},
                        {"backward_us", &stage.passes.backward_us},
                        {"first_us", &stage.passes.first_us},
                        {"last_us", &stage.passes.last_us},
                        {"send_us", &stage.send_us}});
      }
      INTERLACE_TRY(Once("predicted peak_forward", {"predicted peak_forward"}));
      return Numbers({{.name = "peak_forward", .size = &stage.cost.peak_forward},
                      {.name = "peak_backward", .size = &stage.cost.peak_backward},
                      {.name = "host", .size = &stage.cost.host_bytes}});
    }
    INTERLACE_TRY(Once(word, {"layers", "devices", "micro_batch", "zero", "recompute", "offload"}));
    if (word == "layers") {
      INTERLACE_TRY(Whole(s.layers, 0, kMostCount - 1));
      in_.SkipBlanks();
      s.embedding = in_.EatWord("embedding");
      in_.SkipBlanks();
      s.head = in_.EatWord("head");
      return Ok{};
    }
    if (word == "devices") {
      INTERLACE_TRY(Whole(stage.first_device, 0, kMostCount - 1));
      if (!in_.Eat('.') || !in_.Eat('.')) return in_.ErrorHere("expected FIRST..LAST, found " + in_.Found());
      return Whole(out_.places.back().last_device, 0, kMostCount - 1);
    }
    if (word == "micro_batch") {
      INTERLACE_TRY(Whole(s.micro_batch, 1, kMostCount - 1));
      return Numbers({{.name = "dp", .count = &s.dp}, {.name = "tp", .count = &s.tp}});
    }
    if (word == "zero") return Whole(s.zero, 0, kMostCount - 1);
    if (word == "recompute")
      return Numbers({{.name = "full", .count = &s.full}, {.name = "selective", .count = &s.selective}});
    return Numbers({{.name = "weights", .share = &s.weights_out},
                    {.name = "gradients", .share = &s.gradients_out},
                    {.name = "states", .share = &s.states_out},
                    {.name = "activations", .share = &s.activations_out}});
  }

  // Words that follow from others: blocks and micro-batches in flight from a stage's place.
  void Derive() {
    int64_t block = 0;
    for (int64_t i = 0; i < stages_; ++i) {
      PlanStage& stage = out_.plan.stages[i];
      stage.first_block = static_cast<int32_t>(std::min(block, kMostCount - 1));
      block += stage.strategy.layers;
      stage.strategy.micro_batches = static_cast<int32_t>(accumulation_);
      stage.strategy.in_flight = static_cast<int32_t>(std::min(stages_ - i, accumulation_));
    }
  }

  // Error: an unknown line, or one that this part has already.
  Status Once(std::string_view word, std::vector<std::string_view> known) {
    if (std::find(known.begin(), known.end(), word) == known.end()) {
      return in_.ErrorAt(begin_, "unknown line '" + std::string(word) + "'" + DidYouMean(word, known));
    }
    if (std::find(seen_.begin(), seen_.end(), word) != seen_.end()) {
      return in_.ErrorAt(begin_, "'" + std::string(word) + "' is given twice");
    }
    seen_.push_back(word);
    return Ok{};
  }

  // Error: a line that the part that ends here does not have. Predictions of a stage may be left out by hand-written
  // plans.
  Status Missing() {
    std::vector<std::string_view> needed = {"layers", "devices", "micro_batch", "zero", "recompute", "offload"};
    if (stages_ == 0) {
      needed = {"model",           "cluster",      "devices",      "blocks", "global_batch", "sequence",
                "flash_attention", "memory_limit", "accumulation", "space",  "dtype"};
    }
    for (std::string_view word : needed) {
      if (std::find(seen_.begin(), seen_.end(), word) != seen_.end()) continue;
      std::string part = stages_ == 0 ? "the plan" : "stage " + std::to_string(stages_ - 1);
      return in_.ErrorAt(stages_ == 0 ? in_.pos() : stage_begin_, part + " has no line '" + std::string(word) + "'");
    }
    seen_.clear();
    return Ok{};
  }

  Status Text(std::string& out) {
    INTERLACE_ASSIGN(out, in_.String());
    return Ok{};
  }
  template <typename T>
  Status Whole(T& out, int64_t least, int64_t most) {
    size_t begin = in_.pos();
    INTERLACE_ASSIGN(int64_t value, in_.Int());
    if (value < least || value > most) {
      return in_.ErrorAt(begin, "this number must be from " + std::to_string(least) + " to " + std::to_string(most));
    }
    out = static_cast<T>(value);
    return Ok{};
  }
  Status Real(double& out) {
    size_t begin = in_.pos();
    auto [end, problem] = std::from_chars(in_.text().data() + begin, in_.text().data() + in_.text().size(), out);
    if (problem != std::errc() || !std::isfinite(out)) return in_.ErrorHere("expected a number, found " + in_.Found());
    in_.Seek(static_cast<size_t>(end - in_.text().data()));
    return Ok{};
  }
  Status Numbers(const std::vector<Number>& expected) {
    for (const Number& each : expected) {
      in_.SkipBlanks();
      if (!in_.EatWord(each.name))
        return in_.ErrorHere("expected '" + std::string(each.name) + "', found " + in_.Found());
      in_.SkipBlanks();
      if (each.count) INTERLACE_TRY(Whole(*each.count, 0, kMostCount - 1));
      if (each.size) INTERLACE_TRY(Whole(*each.size, 0, int64_t{1} << 62));
      if (each.real) INTERLACE_TRY(Real(*each.real));
      if (each.share) {
        double value = 0;
        INTERLACE_TRY(Real(value));
        *each.share = static_cast<float>(value);
      }
    }
    return Ok{};
  }
  Status LineEnd() {
    in_.SkipBlanks();
    if (!in_.AtLineEnd()) return in_.ErrorHere("expected the end of the line, found " + in_.Found());
    in_.NextLine();
    return Ok{};
  }
  bool StandsHere(std::string_view word) {
    size_t pos = in_.pos();
    bool found = in_.EatWord(word);
    in_.Seek(pos);
    return found;
  }
  // Counted on from the last one, so that a file of many stages is read in one go.
  int32_t LineOf(size_t pos) {
    for (; counted_ < pos; ++counted_) line_ += in_.text()[counted_] == '\n';
    return line_;
  }

  Scanner in_;
  PlanFile out_;
  int64_t accumulation_ = 1;
  int64_t stages_ = 0;
  size_t begin_ = 0, stage_begin_ = 0, counted_ = 0;
  int32_t line_ = 1;
  std::vector<std::string_view> seen_;
};

}  // namespace

Result<PlanFile> ParsePlan(std::string_view text, std::string_view file) {
  return PlanReader(text, file).Run();
}

}  // namespace interlace::plan
