// A small network of two layers whose step runs in the orders of pipelines: whatever the order, the numbers are those
// of one phase that does it all, and the memory plan's places hold what is saved for later runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "ir/carried_places.h"
#include "ir/liveness.h"
#include "ir/memory_plan.h"
#include "ir/testing/arena_replay.h"
#include "ir/testing/interpreter.h"
#include "ir/text.h"
#include "ir/verifier.h"

namespace interlace::testing {
namespace {

// x -> h = tanh(x w) -> y = tanh(h v) -> loss. `$name` stands for a value of the phase.
const std::map<std::string, std::string>& Parts() {
  static const std::map<std::string, std::string> parts = {
      {"f0", "  $a: f32[4,8] = aten.mm(%2, %0) {fwd}\n  $h: f32[4,8] = aten.tanh($a) {fwd}\n"},
      {"f1",
       "  $b: f32[4,8] = aten.mm($h, %1) {fwd}\n  $y: f32[4,8] = aten.tanh($b) {fwd}\n"
       "  $l: f32[] = aten.sum($y) {fwd}\n  output($l) {fwd name=\"loss\"}\n"},
      {"i1",
       "  $o: f32[4,8] = aten.ones_like($y) {bwd}\n  $e: f32[4,8] = aten.tanh_backward($o, $y) {bwd}\n"
       "  $vt: f32[8,8]{1,8} in %11+0 = aten.t(%1) {bwd}\n  $dh: f32[4,8] = aten.mm($e, $vt) {bwd}\n"},
      {"w1",
       "  $ht: f32[8,4]{1,8} in $h+0 = aten.t($h) {bwd}\n  $dv: f32[8,8] = aten.mm($ht, $e) {bwd}\n"
       "  $gv: f32[8,8] in %13+0 = view(%13) {bwd}\n  $sv: f32[8,8] = aten.add.Tensor($gv, $dv) {bwd}\n"
       "  assign($gv, $sv) {bwd}\n"},
      {"i0", "  $d: f32[4,8] = aten.tanh_backward($dh, $h) {bwd}\n"},
      {"w0",
       "  $xt: f32[8,4]{1,8} in %2+0 = aten.t(%2) {bwd}\n  $dw: f32[8,8] = aten.mm($xt, $d) {bwd}\n"
       "  $gw: f32[8,8] in %12+0 = view(%12) {bwd}\n  $sw: f32[8,8] = aten.add.Tensor($gw, $dw) {bwd}\n"
       "  assign($gw, $sw) {bwd}\n"},
  };
  return parts;
}

struct PhaseText {
  std::string name;
  std::vector<std::string> parts, loads, saves;
};

std::string StepText(int micro_batches, const std::string& runs, const std::vector<PhaseText>& phases) {
  std::string text =
      "interlace 1 sharded\nmesh dp 1\nstep " + std::to_string(micro_batches) + " reduce_each\nrun begin\n" + runs +
      "run update\ngroup 0 sgd\nunit u0 dp f32 numel 64 shard 64\nunit u1 dp f32 numel 64 shard 64\n"
      "param %0: f32[8,8] in %10+0 \"w\" trainable group 0 unit u0+0\n"
      "param %1: f32[8,8] in %11+0 \"v\" trainable group 0 unit u1+0\ninput %2: f32[4,8] \"x\"\n"
      "state %10: f32[64] u0.full persistent\nstate %11: f32[64] u1.full persistent\n"
      "state %12: f32[64] u0.grad step\nstate %13: f32[64] u1.grad step\n"
      "phase begin once takes () gives () {\n  %20: f32[64] = aten.zeros_like(%12) {upd}\n"
      "  assign(%12, %20) {upd}\n  %21: f32[64] = aten.zeros_like(%13) {upd}\n  assign(%13, %21) {upd}\n}\n";
  int base = 100;
  for (const PhaseText& phase : phases) {
    std::map<std::string, int> ids;
    const auto id = [&](const std::string& name) {
      return "%" + std::to_string(ids.try_emplace(name, base + static_cast<int>(ids.size())).first->second);
    };
    std::string loads, saves, ops;
    for (const std::string& name : phase.loads)
      loads += (loads.empty() ? "" : ", ") + id(name) + ": f32[4,8] of " + name;
    for (const std::string& part : phase.parts) {
      std::string lines = Parts().at(part);
      for (size_t at; (at = lines.find('$')) != std::string::npos;) {
        size_t end = at + 1;
        while (std::isalnum(static_cast<unsigned char>(lines[end]))) ++end;
        lines.replace(at, end - at, id(lines.substr(at + 1, end - at - 1)));
      }
      ops += lines;
    }
    for (const std::string& name : phase.saves) saves += (saves.empty() ? "" : ", ") + id(name) + " as " + name;
    text += "phase " + phase.name + " takes () gives ()" + (saves.empty() ? "" : " saves (" + saves + ")") +
            (loads.empty() ? "" : " loads (" + loads + ")") + " {\n" + ops + "}\n";
    base += 100;
  }
  return text +
         "phase update once takes () gives () {\n  update.sgd(%10, %12) {upd units=[u0] scale=0.25 ranges=[0, 64, 0]}\n"
         "  update.sgd(%11, %13) {upd units=[u1] scale=0.25 ranges=[0, 64, 0]}\n}\n";
}

// "f0 f1 b0 b1": a letter names the phase.
std::string Runs(const std::string& order, const std::map<char, std::string>& names) {
  std::string out;
  for (size_t i = 0; i < order.size(); i += 3) out += "run " + names.at(order[i]) + " " + order[i + 1] + "\n";
  return out;
}

const std::map<char, std::string> kNames = {
    {'f', "forward"}, {'b', "backward"}, {'w', "weights"}, {'g', "forward.1"}, {'c', "backward.1"}};

std::string Whole() {
  return StepText(4, "run all 0 x4\n", {{"all", {"f0", "f1", "i1", "w1", "i0", "w0"}, {}, {}}});
}
std::string TwoParts(const std::string& order) {
  return StepText(4, Runs(order, kNames),
                  {{"forward", {"f0", "f1"}, {}, {"h", "y"}}, {"backward", {"i1", "w1", "i0", "w0"}, {"h", "y"}, {}}});
}
// Two chunks of one stage.
std::string Interleaved(const std::string& order) {
  return StepText(4, Runs(order, kNames),
                  {{"forward", {"f0"}, {}, {"h"}},
                   {"forward.1", {"f1"}, {"h"}, {"h", "y"}},
                   {"backward.1", {"i1", "w1"}, {"h", "y"}, {"h", "dh"}},
                   {"backward", {"i0", "w0"}, {"h", "dh"}, {}}});
}
// Gradients of inputs first, those of weights when there is time.
std::string Split(const std::string& order) {
  return StepText(4, Runs(order, kNames),
                  {{"forward", {"f0", "f1"}, {}, {"h", "y"}},
                   {"backward", {"i1", "i0"}, {"h", "y"}, {"h", "e", "d"}},
                   {"weights", {"w1", "w0"}, {"h", "e", "d"}, {}}});
}

const std::string kAllForward = "f0 f1 f2 f3 b0 b1 b2 b3 ", kOneEach = "f0 b0 f1 b1 f2 b2 f3 b3 ",
                  k1F1B = "f0 f1 b0 f2 b1 f3 b2 b3 ";

std::vector<std::string> AllOrders() {
  return {TwoParts(kOneEach),
          TwoParts(kAllForward),
          TwoParts(k1F1B),
          Interleaved("f0 f1 g0 g1 c0 f2 c1 f3 b0 g2 b1 g3 c2 c3 b2 b3 "),
          Split("f0 f1 b0 f2 b1 f3 w0 b2 w1 b3 w2 w3 "),
          Split("f0 f1 f2 f3 b0 b1 b2 b3 w0 w1 w2 w3 ")};
}

Program Parsed(const std::string& text) {
  Result<Program> program = Parse(text);
  EXPECT_TRUE(program.ok()) << program.error().ToString() << "\n" << text;
  if (!program.ok()) return Program();
  EXPECT_EQ(Print(*program), text);
  const Status valid = Verify(*program);
  EXPECT_TRUE(valid.ok()) << valid.error().ToString() << "\n" << text;
  return std::move(*program);
}

TEST(Carried, EveryOrderGivesTheSameNumbers) {
  Result<RunResult> expected = Interpret(Parsed(Whole()), {.steps = 3});
  ASSERT_TRUE(expected.ok()) << expected.error().ToString();
  for (const std::string& text : AllOrders()) {
    Program program = Parsed(text);
    Result<RunResult> got = Interpret(program, {.steps = 3});
    ASSERT_TRUE(got.ok()) << got.error().ToString() << "\n" << text;
    EXPECT_EQ(FirstDifference(*expected, *got), "") << text;
    program.Compact();
    Result<RunResult> compact = Interpret(program, {.steps = 3});
    ASSERT_TRUE(compact.ok()) << compact.error().ToString();
    EXPECT_EQ(FirstDifference(*expected, *compact), "") << Print(program);
  }
}

TEST(Carried, PlacesHoldWhatIsSaved) {
  for (const std::string& text : AllOrders()) {
    const Program program = Parsed(text);
    Result<MemoryPlan> plan = PlanMemory(program);
    ASSERT_TRUE(plan.ok()) << plan.error().ToString();
    const Status replayed = ReplayPlan(program, *plan, 3);
    EXPECT_TRUE(replayed.ok()) << replayed.error().ToString() << "\n" << text;
  }
}

// The most that is in use at once: of two storages, h and y.
TEST(Carried, TheWindowOf1F1BIsSmaller) {
  const auto places = [](const std::string& text) { return PlaceCarried(Parsed(text))->saved_by.size(); };
  EXPECT_EQ(places(TwoParts(kOneEach)), 2u);
  EXPECT_EQ(places(TwoParts(k1F1B)), 2u * 2);
  EXPECT_EQ(places(TwoParts(kAllForward)), 2u * 4);
  const auto bytes = [](const std::string& text) { return PlanMemory(Parsed(text))->taken_bytes; };
  EXPECT_LT(bytes(TwoParts(kOneEach)), bytes(TwoParts(k1F1B)));
  EXPECT_LT(bytes(TwoParts(k1F1B)), bytes(TwoParts(kAllForward)));
  const std::vector<int64_t> through = *BytesThroughRuns(Parsed(TwoParts(k1F1B)));  // h and y: 256 bytes
  EXPECT_EQ(through, (std::vector<int64_t>{0, 0, 256, 256, 256, 256, 256, 256, 0, 0}));
}

TEST(Carried, AVariantForEachChoiceOfPlaces) {
  const Program program = Parsed(TwoParts(k1F1B));
  const MemoryPlan plan = *PlanMemory(program);
  ASSERT_EQ(plan.turns.size(), 10u);
  // begin, f into 0, f into 1, b from 0, b from 1, update; f0 and f2 differ in what lives beside them.
  const auto places_of = [&](size_t entry) { return plan.variants[plan.VariantOf(entry, 0)].same_as; };
  std::set<int32_t> places;
  for (size_t entry = 0; entry < 10; ++entry) places.insert(places_of(entry));
  EXPECT_EQ(places.size(), 6u);
  EXPECT_EQ(places_of(1), places_of(4)) << "micro-batches 0 and 2 lie in one place";
  EXPECT_NE(plan.VariantOf(1, 0), plan.VariantOf(4, 0));
  EXPECT_EQ(places_of(3), places_of(7));
  for (const PlanVariant& v : plan.variants) EXPECT_EQ(v.block_of, plan.variants[v.same_as].block_of);
}

// What lives at once by the plan is what lives at once: no run is planned with what another run has beside it.
TEST(Carried, ThePlanIsAsLargeAsWhatLives) {
  for (const std::string& text : AllOrders()) {
    const Program program = Parsed(text);
    const std::vector<int64_t> through = *BytesThroughRuns(program);
    int64_t most = 0;
    size_t run = 0;
    for (const auto& [phase, count] : program.RunOrder()) {
      const PhaseLiveness life = *ComputeLiveness(program, *phase);
      for (int64_t i = 0; i < count; ++i, ++run) most = std::max(most, life.peak_bytes + through[run]);
    }
    EXPECT_EQ(PlanMemory(program)->live_bytes, most) << text;
  }
}

}  // namespace
}  // namespace interlace::testing
