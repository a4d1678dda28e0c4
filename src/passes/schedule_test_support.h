// schedule_test_support.h — a cluster and a profile whose numbers can be used by hand, and programs to move gathers in.
// For tests only.
//
// Two ranks. A coalesced gather of V bytes: 8 us + V/2 at 16 bytes/us, so T(256) = 16 us, T(512) = 24 us. Reductions
// alike.
#pragma once

#include <string>

#include "base/files.h"
#include "ir/testing/interpreter.h"
#include "passes/pass_test_support.h"

namespace interlace {

inline constexpr std::string_view kHandCluster = R"(devices = 2
per_node = 2
[device]
kind = "gpu"
memory_gib = 1
tflops_half = 1
tflops_single = 1
tflops_double = 1
memory_gb_per_s = 1
shortest_us = 1
issue_us = 0
[kernels]
mm_efficiency = 1
mm_wave_exponent = 0
mm_half_k = 0
mm_transposed_efficiency = 1
mm_transposed_wave_exponent = 0
mm_transposed_half_k = 0
memory_efficiency = 1
attention_efficiency = 1
attention_half_sequence = 0
attention_backward_efficiency = 1
attention_backward_half_sequence = 0
[host]
h2d_gb_per_s = 1
d2h_gb_per_s = 1
host_gb_per_s = 1
copy_us = 0
file_read_gb_per_s = 1
file_write_gb_per_s = 1
cores = 1
[intra]
alpha_us = 8
gb_per_s = 0.016
[inter]
alpha_us = 100
gb_per_s = 0.001
)";

// "cluster=FILE" with the text above, or a change of it.
inline std::string HandCluster(const std::string& from = "", const std::string& to = "") {
  std::string text(kHandCluster);
  if (!from.empty()) text.replace(text.find(from), from.size(), to);
  const std::string path =
      ::testing::TempDir() + "interlace-hand-" + std::to_string(std::hash<std::string>{}(text)) + ".toml";
  Status written = WriteFile(path, text);
  return written.ok() ? "cluster=" + path : written.error().ToString();
}

// "profile=FILE" with these lines.
inline std::string HandProfile(const std::string& lines) {
  const std::string text = "interlace-profile 1\nfingerprint \"hand\"\n" + lines;
  const std::string path =
      ::testing::TempDir() + "interlace-hand-" + std::to_string(std::hash<std::string>{}(text)) + ".profile";
  Status written = WriteFile(path, text);
  return written.ok() ? "profile=" + path : written.error().ToString();
}

// The ops of the first phase in short: "gather u0+u1", "wait", "mul", "release", ..., views left out.
inline std::string Outline(const std::string& text, const std::string& phase_name = "") {
  Result<Program> program = Parse(text, "outline");
  if (!program.ok()) return text;
  const Phase* phase = phase_name.empty() ? &program->phases[0] : program->FindPhase(phase_name);
  std::string out;
  for (OpId id : phase->ops) {
    const Op& op = program->op(id);
    if (op.name == "view" || op.name == "output" || op.name == "grad.begin") continue;
    std::string_view name = op.name;
    if (name.starts_with("aten.")) name.remove_prefix(5);
    name = name.substr(0, name.find('.'));
    out += out.empty() ? "" : " ";
    if (op.name.ends_with(".wait")) {
      out += name == "gather" ? "wait" : "wait_reduce";
    } else {
      out += name;
    }
    for (size_t i = 0; i < op.units.size(); ++i) out += (i == 0 ? ":u" : "+u") + std::to_string(op.units[i]);
  }
  return out;
}

// "" when the program gives, after the pipeline, the bits of the textbook step; else what differs.
inline std::string BitsDiffer(const std::string& captured, const std::string& pipeline, int64_t accumulation = 1,
                              const std::string& mode = "reduce_each", int64_t ranks = 2) {
  testing::InterpretOptions run;
  run.ranks = ranks;
  run.accumulation = accumulation;
  run.accumulate_mode = mode;
  Result<Program> before = Parse(captured, "captured");
  if (!before.ok()) return before.error().ToString();
  Result<testing::RunResult> expected = testing::Interpret(*before, run);
  if (!expected.ok()) return expected.error().ToString();
  Result<Program> after = Parse(RunText(captured, pipeline), "after");
  if (!after.ok()) return RunText(captured, pipeline);
  Result<testing::RunResult> actual = testing::Interpret(*after, run);
  if (!actual.ok()) return actual.error().ToString();
  return testing::FirstDifference(*expected, *actual);
}

// Three layers y = x * w with weights f32[64] (256 bytes gathered, 128 a shard), forward only.
inline constexpr std::string_view kChain = R"(interlace 1 captured
module 0 "" "Chain"
param %0: f32[64] "a.w" frozen
param %1: f32[64] "b.w" frozen
param %2: f32[64] "c.w" frozen
input %3: f32[64] "x"
phase micro_batch takes () gives () {
  %4: f32[64] = aten.mul.Tensor(%3, %0) {fwd}
  %5: f32[64] = aten.mul.Tensor(%4, %1) {fwd}
  %6: f32[64] = aten.mul.Tensor(%5, %2) {fwd}
  output(%6) {fwd name="y"}
}
)";

// Two layers with gradients: forward uses a, b; backward b, a; the gradient of b is complete before that of a.
inline constexpr std::string_view kTwoLayers = R"(interlace 1 captured
group 0 sgd
module 0 "" "Net"
module 1 "net.a" "Scale"
module 2 "net.b" "Scale"
param %0: f32[64] "net.a.w" trainable group 0
param %1: f32[64] "net.b.w" trainable group 0
input %2: f32[64] "x"
phase micro_batch takes () gives () {
  %3: f32[64] = aten.mul.Tensor(%2, %0) {fwd m1}
  %4: f32[64] = aten.mul.Tensor(%3, %1) {fwd m2}
  %5: f32[] = aten.sum(%4) {fwd}
  output(%5) {fwd name="loss"}
  %6: f32[64] = aten.mul.Tensor(%4, %3) {bwd m2}
  grad(%1, %6) {bwd m2}
  %7: f32[64] = aten.mul.Tensor(%4, %1) {bwd m2}
  %8: f32[64] = aten.mul.Tensor(%7, %2) {bwd m1}
  grad(%0, %8) {bwd m1}
  %9: f32[64] = aten.mul.Tensor(%7, %0) {bwd m1}
  output(%9) {bwd name="dx"}
}
)";

}  // namespace interlace
