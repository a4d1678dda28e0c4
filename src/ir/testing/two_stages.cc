#include "ir/testing/two_stages.h"

namespace interlace::testing {
namespace {

// "$3" in `text` is the value `base` + 3.
std::string Numbered(std::string text, int base) {
  for (size_t at; (at = text.find('$')) != std::string::npos;) {
    size_t end = at + 1;
    while (end < text.size() && text[end] >= '0' && text[end] <= '9') ++end;
    text.replace(at, end - at, "%" + std::to_string(base + std::stoi(text.substr(at + 1, end - at - 1))));
  }
  return text;
}

std::string Heading(const std::string& mesh, int micro_batches, const std::string& runs) {
  return "interlace 1 sharded\n" + mesh + "mesh dp 2\nstep " + std::to_string(micro_batches) +
         " reduce_each\nrun begin\n" + runs + "run update\ngroup 0 sgd\n";
}

// A unit of one parameter that every rank has whole, and the phases around those of the micro-batches.
struct LayerNames {
  std::string name, param, full, grad, unit;
};
const LayerNames kFirst = {"w", "%0", "%10", "%12", "u0"}, kSecond = {"v", "%1", "%11", "%13", "u0"};

std::string UnitLine(const LayerNames& layer) {
  return "unit " + layer.unit + " dp f32 numel 64 shard 32\n";
}
std::string ParamLine(const LayerNames& layer) {
  return "param " + layer.param + ": f32[8,8] in " + layer.full + "+0 \"" + layer.name + "\" trainable group 0 unit " +
         layer.unit + "+0\n";
}
std::string StateLines(const LayerNames& layer) {
  return "state " + layer.full + ": f32[64] " + layer.unit + ".full persistent\nstate " + layer.grad + ": f32[64] " +
         layer.unit + ".grad step\n";
}
std::string BeginOps(const LayerNames& layer, int base) {
  return Numbered("  $0: f32[64] = aten.zeros_like(" + layer.grad + ") {upd}\n  assign(" + layer.grad + ", $0) {upd}\n",
                  base);
}
std::string UpdateOps(const LayerNames& layer, int base) {
  return Numbered("  $0: f32[64] = all_reduce.start(" + layer.grad +
                      ") {upd axis=dp}\n  all_reduce.wait($0) {upd}\n  update.sgd(" + layer.full +
                      ", $0) {upd units=[" + layer.unit + "] scale=0.125 ranges=[0, 64, 0]}\n",
                  base);
}
// Adds the product of what came in, transposed, and the gradient of what went out.
std::string AddGradient(const LayerNames& layer, const std::string& in, const std::string& out, int base) {
  return Numbered("  $0: f32[8,4]{1,8} in " + in + "+0 = aten.t(" + in + ") {bwd}\n  $1: f32[8,8] = aten.mm($0, " +
                      out + ") {bwd}\n  $2: f32[8,8] in " + layer.grad + "+0 = view(" + layer.grad +
                      ") {bwd}\n  $3: f32[8,8] = aten.add.Tensor($2, $1) {bwd}\n  assign($2, $3) {bwd}\n",
                  base);
}

// From h at $0 to its gradient at $6.
std::string SecondLayer(const LayerNames& layer, int base) {
  return Numbered("  $1: f32[4,8] = aten.mm($0, " + layer.param +
                      ") {fwd}\n  $2: f32[4,8] = aten.tanh($1) {fwd}\n"
                      "  $3: f32[] = aten.sum($2) {fwd}\n  output($3) {fwd name=\"loss\"}\n"
                      "  $4: f32[4,8] = aten.ones_like($2) {bwd}\n  $5: f32[4,8] = aten.tanh_backward($4, $2) {bwd}\n"
                      "  $7: f32[8,8]{1,8} in " +
                      layer.full + "+0 = aten.t(" + layer.param +
                      ") {bwd}\n"
                      "  $6: f32[4,8] = aten.mm($5, $7) {bwd}\n",
                  base) +
         AddGradient(layer, "%" + std::to_string(base), "%" + std::to_string(base + 5), base + 10);
}

std::string PhaseOf(const std::string& name, const std::string& lists, const std::string& ops) {
  return "phase " + name + " " + lists + " {\n" + ops + "}\n";
}

std::string SecondStageOf(int micro_batches, const std::string& runs, const std::string& phases) {
  return Heading("mesh pp 2\n", micro_batches, runs) + UnitLine(kSecond) + ParamLine(kSecond) + StateLines(kSecond) +
         PhaseOf("begin", "once takes () gives ()", BeginOps(kSecond, 20)) + phases +
         PhaseOf("update", "once takes () gives ()", UpdateOps(kSecond, 90));
}

std::string Receive(const std::string& value) {
  return value + ": f32[4,8] = recv.start() {fwd axis=pp peer=0}\n";
}
std::string WorkAndSend(int base) {
  return Numbered("  recv.wait($0) {fwd}\n", base) + SecondLayer(kSecond, base) +
         Numbered("  $8: b8[0] = send.start($6) {bwd axis=pp peer=0}\n  send.wait($8) {bwd}\n", base);
}

}  // namespace

std::string WholeNetwork() {
  const LayerNames second = {"v", "%1", "%11", "%13", "u1"};
  return Heading("", 4, "run all 0 x4\n") + UnitLine(kFirst) + UnitLine(second) + ParamLine(kFirst) +
         ParamLine(second) + "input %2: f32[4,8] \"x\"\n" + StateLines(kFirst) + StateLines(second) +
         PhaseOf("begin", "once takes () gives ()", BeginOps(kFirst, 20) + BeginOps(second, 21)) +
         PhaseOf("all", "takes () gives ()",
                 "  %30: f32[4,8] = aten.mm(%2, %0) {fwd}\n  %100: f32[4,8] = aten.tanh(%30) {fwd}\n" +
                     SecondLayer(second, 100) + "  %42: f32[4,8] = aten.tanh_backward(%106, %100) {bwd}\n" +
                     AddGradient(kFirst, "%2", "%42", 50)) +
         PhaseOf("update", "once takes () gives ()", UpdateOps(kFirst, 90) + UpdateOps(second, 91));
}

std::string FirstStage(const std::string& order) {
  std::string runs;
  for (size_t i = 0; i < order.size(); i += 3)
    runs += std::string(order[i] == 'f' ? "run forward " : "run backward ") + order[i + 1] + "\n";
  return Heading("mesh pp 2\n", 4, runs) + UnitLine(kFirst) + ParamLine(kFirst) + "input %2: f32[4,8] \"x\"\n" +
         StateLines(kFirst) + PhaseOf("begin", "once takes () gives ()", BeginOps(kFirst, 20)) +
         PhaseOf("forward", "takes () gives () saves (%31 as h)",
                 "  %30: f32[4,8] = aten.mm(%2, %0) {fwd}\n  %31: f32[4,8] = aten.tanh(%30) {fwd}\n"
                 "  %32: b8[0] = send.start(%31) {fwd axis=pp peer=1}\n  send.wait(%32) {fwd}\n") +
         PhaseOf("backward", "takes () gives () loads (%40: f32[4,8] of h)",
                 "  %41: f32[4,8] = recv.start() {bwd axis=pp peer=1}\n  recv.wait(%41) {bwd}\n"
                 "  %42: f32[4,8] = aten.tanh_backward(%41, %40) {bwd}\n" +
                     AddGradient(kFirst, "%2", "%42", 50)) +
         PhaseOf("update", "once takes () gives ()", UpdateOps(kFirst, 90));
}

std::string SecondStage() {
  return SecondStageOf(
      4, "run first 0\nrun middle 1 x2\nrun last 3\n",
      PhaseOf("first", "takes () gives (%200)", "  " + Receive("%100") + "  " + Receive("%200") + WorkAndSend(100)) +
          PhaseOf("middle", "takes (%300: f32[4,8]) gives (%400)", "  " + Receive("%400") + WorkAndSend(300)) +
          PhaseOf("last", "takes (%500: f32[4,8]) gives ()", WorkAndSend(500)));
}

std::string SecondStageOneByOne(int micro_batches) {
  return SecondStageOf(micro_batches,
                       "run both 0" + (micro_batches > 1 ? " x" + std::to_string(micro_batches) : std::string()) + "\n",
                       PhaseOf("both", "takes () gives ()", "  " + Receive("%100") + WorkAndSend(100)));
}

}  // namespace interlace::testing
