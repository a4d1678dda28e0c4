#include <algorithm>
#include <array>
#include <charconv>
#include <string>
#include <utility>

#include "base/append.h"
#include "base/scan.h"
#include "plan/plan_text.h"

namespace interlace::plan {
namespace {

// The shortest text that reads back as the same number.
template <typename T>
std::string Shortest(T value) {
  std::array<char, 40> buffer;
  auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  return {buffer.data(), end};
}

std::string Fixed(double value, int digits) {
  std::array<char, 400> buffer;
  auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::fixed, digits).ptr;
  return {buffer.data(), end};
}
std::string Gib(int64_t bytes) {
  return Fixed(static_cast<double>(bytes) / 1073741824.0, 2) + " GiB";
}

class Printer {
 public:
  explicit Printer(const PlanFile& file) : file_(file), plan_(file.plan) {}

  std::string Run() {
    Line("interlace-" + std::string(kPlanKind) + " " + std::to_string(kPlanVersion));
    Summary();
    Quoted("model", plan_.model);
    Quoted("cluster", plan_.cluster);
    Line("devices " + std::to_string(file_.devices) + " per_node " + std::to_string(file_.per_node));
    Line("blocks " + std::to_string(file_.blocks));
    Line("global_batch " + std::to_string(plan_.global_batch), "samples of a step");
    Line("sequence " + std::to_string(plan_.sequence), "tokens of a sample");
    Line(std::string("flash_attention ") + (plan_.flash_attention ? "yes" : "no"));
    Quoted("dtype", file_.dtype);
    Line("memory_limit " + std::to_string(file_.memory_limit), Gib(file_.memory_limit) + " of a device");
    Line(std::string("template ") + (file_.as_run ? "runtime" : "overlap"),
         file_.as_run ? "predicted as interlace train carries it out"
                      : "Mist's: whole layers move beside their neighbours' compute");
    Line("accumulation " + std::to_string(plan_.micro_batches()), "micro-batches of a step, the same on every rank");
    Quoted("space", plan_.space);
    Line("predicted step_us " + Shortest(plan_.step_us) + " pipeline_us " + Shortest(plan_.pipeline_us) + " bound_us " +
         Shortest(plan_.bound_us));
    for (size_t i = 0; i < plan_.stages.size(); ++i) Stage(i, plan_.stages[i]);
    return std::move(out_);
  }

 private:
  void Line(std::string text, std::string_view comment = {}) {
    if (!comment.empty()) {
      text.resize(std::max(text.size() + 2, size_t{36}), ' ');
      text += "# ";
      text += comment;
    }
    out_ += text;
    out_ += '\n';
  }
  void Quoted(std::string_view key, std::string_view value) {
    std::string text = std::string(key) + " ";
    AppendQuoted(text, value);
    Line(std::move(text));
  }

  void Summary() {
    std::string text = "# " + Fixed(plan_.step_us / 1e6, 3) + " s a step predicted, " +
                       Fixed(plan_.samples_per_s(), 2) + " samples/s; ";
    text += plan_.gap() > 0 ? "no plan of the space is more than " + Fixed(100 * plan_.gap(), 1) + " % faster"
                            : std::string("the best of the space");
    Line(std::move(text));
  }

  void Stage(size_t index, const PlanStage& stage) {
    const Strategy& s = stage.strategy;
    const StageCost& c = stage.cost;
    const PassTimes& p = stage.passes;
    out_ += '\n';
    Line("stage " + std::to_string(index));
    int64_t last = int64_t{stage.first_block} + s.layers - 1;
    Line("  layers " + std::to_string(s.layers) + (s.embedding ? " embedding" : "") + (s.head ? " head" : ""),
         s.layers == 0 ? std::string("no block") : Joined("blocks ", stage.first_block, " to ", last));
    int64_t devices = int64_t{s.dp} * s.tp;
    int64_t last_device =
        index < file_.places.size() ? file_.places[index].last_device : stage.first_device + devices - 1;
    Line("  devices " + std::to_string(stage.first_device) + ".." + std::to_string(last_device));
    Line(Joined("  micro_batch ", s.micro_batch, " dp ", s.dp, " tp ", s.tp));
    Line("  zero " + std::to_string(s.zero));
    Line("  recompute full " + std::to_string(s.full) + " selective " + std::to_string(s.selective),
         std::to_string(int64_t{s.layers} - s.full - s.selective) + " kept");
    Line("  offload weights " + Shortest(s.weights_out) + " gradients " + Shortest(s.gradients_out) + " states " +
         Shortest(s.states_out) + " activations " + Shortest(s.activations_out));
    Line("  predicted t_us " + Shortest(c.stable_us) + " d_us " + Shortest(c.extra_us) + " forward_us " +
         Shortest(p.forward_us) + " backward_us " + Shortest(p.backward_us) + " first_us " + Shortest(p.first_us) +
         " last_us " + Shortest(p.last_us) + " send_us " + Shortest(stage.send_us));
    Line("  predicted peak_forward " + std::to_string(c.peak_forward) + " peak_backward " +
             std::to_string(c.peak_backward) + " host " + std::to_string(c.host_bytes),
         Gib(std::max(c.peak_forward, c.peak_backward)) + " of a device");
  }

  const PlanFile& file_;
  const Plan& plan_;
  std::string out_;
};

}  // namespace

std::string PrintPlan(const PlanFile& file) {
  return Printer(file).Run();
}

}  // namespace interlace::plan
