#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/scan.h"
#include "base/suggest.h"
#include "plan/plan_text.h"

namespace interlace::plan {
namespace {

constexpr int64_t kMostStages = 4096;
constexpr int64_t kMostCount = int64_t{1} << 31;  // of blocks, devices, samples of a micro-batch

struct Choice {  // one of two words
  bool* to;
  std::string_view yes, no;
};
struct Mark {  // a word that may be left out
  bool* to;
};
// What stands in a line: its name, if it has one, and its value. Named "..", it follows the one before without blanks.
struct Field {
  std::string_view name;
  std::variant<std::string*, double*, float*, int32_t*, int64_t*, Choice, Mark> to;
  int64_t low = 0, high = kMostCount - 1;  // of whole numbers
};
struct LineForm {
  std::string_view word;
  std::vector<Field> fields;
  bool needed = true;
};

class PlanReader {
 public:
  PlanReader(std::string_view text, std::string_view file) : in_(text, file) {}

  Result<PlanFile> Run() {
    INTERLACE_TRY(in_.Header(kPlanKind, kPlanVersion, kPlanVersion, "plan again"));
    forms_ = HeadForms();
    while (!in_.AtEnd()) {
      begin_ = in_.pos();
      std::string_view word = in_.Word();
      in_.SkipBlanks();
      if (word == "stage") {
        INTERLACE_TRY(StageLine());
      } else {
        INTERLACE_TRY(Line(stages_ > 0 && word == "predicted" ? WhatIsPredicted() : word));
      }
      INTERLACE_TRY(in_.EndLine());
    }
    INTERLACE_TRY(Missing());
    if (stages_ == 0) return in_.ErrorHere("the plan has no stage");
    Derive();
    return std::move(out_);
  }

 private:
  std::vector<LineForm> HeadForms() {
    constexpr int64_t kMany = int64_t{1} << 40;
    Plan& plan = out_.plan;
    return {{"model", {{"", &plan.model}}},
            {"cluster", {{"", &plan.cluster}}},
            {"devices", {{"", &out_.devices, 1, kMostCount}, {"per_node", &out_.per_node, 1, kMostCount}}},
            {"blocks", {{"", &out_.blocks, 1, kMostCount}}},
            {"global_batch", {{"", &plan.global_batch, 1, kMany}}},
            {"sequence", {{"", &plan.sequence, 1, kMany}}},
            {"flash_attention", {{"", Choice{&plan.flash_attention, "yes", "no"}}}},
            {"memory_limit", {{"", &out_.memory_limit, 0, int64_t{1} << 62}}},
            {"template", {{"", Choice{&out_.as_run, "runtime", "overlap"}}}, false},
            {"accumulation", {{"", &accumulation_, 1}}},
            {"space", {{"", &plan.space}}},
            {"dtype", {{"", &out_.dtype}}},
            {"predicted",
             {{"step_us", &plan.step_us}, {"pipeline_us", &plan.pipeline_us}, {"bound_us", &plan.bound_us}},
             false}};
  }

  // Predictions of a stage may be left out by plans written by hand.
  std::vector<LineForm> StageForms() {
    constexpr int64_t kBytes = int64_t{1} << 62;
    PlanStage& stage = out_.plan.stages.back();
    Strategy& s = stage.strategy;
    return {{"layers", {{"", &s.layers}, {"embedding", Mark{&s.embedding}}, {"head", Mark{&s.head}}}},
            {"devices", {{"", &stage.first_device}, {"..", &out_.places.back().last_device}}},
            {"micro_batch", {{"", &s.micro_batch, 1}, {"dp", &s.dp}, {"tp", &s.tp}}},
            {"zero", {{"", &s.zero}}},
            {"recompute", {{"full", &s.full}, {"selective", &s.selective}}},
            {"offload",
             {{"weights", &s.weights_out},
              {"gradients", &s.gradients_out},
              {"states", &s.states_out},
              {"activations", &s.activations_out}}},
            {"predicted t_us",
             {{"t_us", &stage.cost.stable_us},
              {"d_us", &stage.cost.extra_us},
              {"forward_us", &stage.passes.forward_us},
              {"backward_us", &stage.passes.backward_us},
              {"first_us", &stage.passes.first_us},
              {"last_us", &stage.passes.last_us},
              {"send_us", &stage.send_us}},
             false},
            {"predicted peak_forward",
             {{"peak_forward", &stage.cost.peak_forward, 0, kBytes},
              {"peak_backward", &stage.cost.peak_backward, 0, kBytes},
              {"host", &stage.cost.host_bytes, 0, kBytes}},
             false}};
  }

  Status StageLine() {
    INTERLACE_TRY(Missing());
    INTERLACE_ASSIGN(int64_t number, in_.Int());
    if (number != stages_) {
      return in_.ErrorAt(begin_, "stages stand in order: this one must be 'stage " + std::to_string(stages_) + "'");
    }
    if (stages_ == kMostStages) return in_.ErrorAt(begin_, "more than 4096 stages");
    ++stages_;
    out_.plan.stages.emplace_back();
    out_.places.push_back({LineOf(begin_), 0});
    stage_begin_ = begin_;
    forms_ = StageForms();
    seen_.clear();
    return Ok{};
  }

  // A stage has two lines of predictions.
  std::string_view WhatIsPredicted() {
    const size_t begin = in_.pos();
    const bool times = in_.EatWord("t_us");
    in_.Seek(begin);
    return times ? "predicted t_us" : "predicted peak_forward";
  }

  // Error: an unknown line, or one that this part has already.
  Status Line(std::string_view word) {
    auto form = std::find_if(forms_.begin(), forms_.end(), [&](const LineForm& f) { return f.word == word; });
    if (form == forms_.end()) {
      std::vector<std::string_view> known;
      for (const LineForm& each : forms_) known.push_back(each.word);
      return in_.ErrorAt(begin_, "unknown line '" + std::string(word) + "'" + DidYouMean(word, known));
    }
    if (std::find(seen_.begin(), seen_.end(), word) != seen_.end()) {
      return in_.ErrorAt(begin_, "'" + std::string(word) + "' is given twice");
    }
    seen_.push_back(form->word);
    for (const Field& field : form->fields) INTERLACE_TRY(Read(field));
    return Ok{};
  }

  Status Read(const Field& field) {
    if (const Mark* mark = std::get_if<Mark>(&field.to)) {
      in_.SkipBlanks();
      *mark->to = in_.EatWord(field.name);
      return Ok{};
    }
    if (field.name == "..") {
      if (!in_.Eat('.') || !in_.Eat('.')) return in_.ErrorHere("expected FIRST..LAST, found " + in_.Found());
    } else if (!field.name.empty()) {
      INTERLACE_TRY(in_.Expect(field.name));
    }
    return std::visit([&](auto to) { return ReadTo(to, field); }, field.to);
  }
  Status ReadTo(std::string* to, const Field&) {
    INTERLACE_ASSIGN(*to, in_.String());
    return Ok{};
  }
  Status ReadTo(const Choice& choice, const Field&) {
    *choice.to = in_.EatWord(choice.yes);
    if (*choice.to || in_.EatWord(choice.no)) return Ok{};
    return in_.ErrorHere("expected " + std::string(choice.yes) + " or " + std::string(choice.no) + ", found " +
                         in_.Found());
  }
  Status ReadTo(const Mark&, const Field&) { return Ok{}; }
  template <typename Number>
  Status ReadTo(Number* to, const Field& field) {
    if constexpr (std::is_floating_point_v<Number>) {
      INTERLACE_ASSIGN(double value, in_.Real());
      *to = static_cast<Number>(value);
    } else {
      INTERLACE_ASSIGN(int64_t value, in_.IntFrom(field.low, field.high));
      *to = static_cast<Number>(value);
    }
    return Ok{};
  }

  // Error: a line that the part that ends here does not have.
  Status Missing() {
    for (const LineForm& form : forms_) {
      if (!form.needed || std::find(seen_.begin(), seen_.end(), form.word) != seen_.end()) continue;
      std::string part = stages_ == 0 ? "the plan" : "stage " + std::to_string(stages_ - 1);
      return in_.ErrorAt(stages_ == 0 ? in_.pos() : stage_begin_,
                         part + " has no line '" + std::string(form.word) + "'");
    }
    return Ok{};
  }

  // What follows from the rest: blocks and micro-batches in flight from a stage's place.
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
  std::vector<LineForm> forms_;  // of the part that is read: the head, or a stage
  std::vector<std::string_view> seen_;
};

}  // namespace

Result<PlanFile> ParsePlan(std::string_view text, std::string_view file) {
  return PlanReader(text, file).Run();
}

}  // namespace interlace::plan
