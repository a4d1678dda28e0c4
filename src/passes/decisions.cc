#include "passes/decisions.h"

namespace interlace {

std::vector<PassCall> CallsOf(const CapturedDecisions& decisions) {
  using Recompute = CapturedDecisions::Recompute;
  std::vector<PassCall> calls;
  if (decisions.parts > 1) {
    calls.push_back(MakeCall("split", {{"parts", std::to_string(decisions.parts)}}));
    calls.push_back(MakeCall("canonicalize"));
  }
  if (decisions.recompute != Recompute::kNothing) {
    std::string blocks;
    for (const std::string& block : decisions.blocks) blocks += (blocks.empty() ? "" : "+") + block;
    calls.push_back(
        MakeCall("recompute", {{"mode", decisions.recompute == Recompute::kBlocks ? "full" : "selective"}}));
    if (!blocks.empty()) calls.back().options.Set("blocks", blocks);
  }
  if (decisions.width > 1)
    calls.push_back(MakeCall("breadth_first", {{"micro_batches", std::to_string(decisions.width)}}));
  return calls;
}

std::vector<PassCall> CallsOf(const Decisions& decisions) {
  std::vector<PassCall> calls = decisions.heuristic;
  if (decisions.schedule) calls = {MakeCall("schedule", OptionsOf(*decisions.schedule))};
  if (decisions.next_step > 0) {
    PassOptions options{{"share", std::to_string(decisions.next_step)}};
    if (decisions.ahead != 1) options.Set("ahead", std::to_string(decisions.ahead));
    calls.push_back(MakeCall("reposition_update", std::move(options)));
  }
  if (decisions.overlap_update || decisions.offload) calls.push_back(MakeCall("overlap_update"));
  if (decisions.offload) calls.push_back(*decisions.offload);
  return calls;
}

std::string NameOf(const std::string& origin, const Decisions& decisions) {
  using Recompute = CapturedDecisions::Recompute;
  const CapturedDecisions& captured = decisions.captured;
  std::string name = origin;
  if (decisions.next_step > 0) {
    const char* share = decisions.next_step == 1       ? "the"
                        : decisions.next_step == 0.25  ? "a quarter of the"
                        : decisions.next_step == 0.125 ? "an eighth of the"
                                                       : "three eighths of the";
    name += std::string(", ") + share + " updates in the next step";
  }
  if (decisions.offload) name += ", offload";
  if (captured.parts > 1) name += ", " + std::to_string(captured.parts) + " parts of a micro-batch side by side";
  if (captured.width > 1) name += ", " + std::to_string(captured.width) + " micro-batches side by side";
  if (captured.regather) name += ", rows gathered again";
  if (captured.reduce_last) name += ", gradients reduced once a step";
  if (captured.recompute == Recompute::kSelective) name += ", selective recomputation";
  if (captured.recompute == Recompute::kBlocks) {
    name += ", recomputation of " + std::to_string(captured.blocks.size()) + " of " +
            std::to_string(captured.all_blocks) + " blocks";
  }
  return name;
}

}  // namespace interlace
