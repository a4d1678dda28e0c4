// What is saved for later runs of a micro-batch counts in the memory of the runs between.
#include <gtest/gtest.h>

#include <map>

#include "ir/text.h"
#include "ir/verifier.h"
#include "sim/report_data.h"
#include "sim/simulate.h"
#include "sim/testing/random_step.h"
#include "trace/testing/read_json.h"

namespace interlace {
namespace {

// h has 4000 bytes and takes 8 us, y is made of it; backward uses h.
Program InOrder(const std::string& order) {
  std::string runs;
  for (size_t i = 0; i < order.size(); i += 3)
    runs += std::string(order[i] == 'f' ? "run forward " : "run backward ") + order[i + 1] + "\n";
  Result<Program> program = Parse("interlace 1 scheduled\nmesh dp 1\nstep 4 reduce_each\n" + runs +
                                  "input %0: f32[1000] \"x\"\n"
                                  "phase forward takes () gives () saves (%10 as h) {\n"
                                  "  %10: f32[1000] = aten.relu(%0) {fwd}\n  %11: f32[1000] = aten.relu(%10) {fwd}\n}\n"
                                  "phase backward takes () gives () loads (%20: f32[1000] of h) {\n"
                                  "  %21: f32[1000] = aten.relu(%20) {bwd}\n}\n");
  EXPECT_TRUE(program.ok()) << ErrorOf(program);
  if (!program.ok()) return Program();
  const Status valid = Verify(*program);
  EXPECT_TRUE(valid.ok()) << valid.error().ToString();
  return std::move(*program);
}

TEST(Carried, CountsBetweenItsRuns) {
  const auto peak = [](const std::string& order) {
    const Program program = InOrder(order);
    Result<Simulation> s = Simulate(program, RoundCluster(1, 1), nullptr, {});
    EXPECT_TRUE(s.ok()) << ErrorOf(s);
    EXPECT_EQ(s->makespan_ps(), int64_t{4} * 3 * 8'000'000);
    EXPECT_EQ(s->lowered->phases.size(), 2u) << "a phase is lowered once, however often the order names it";
    EXPECT_EQ(*PeakBytes(*s->lowered), s->memory.peak.bytes);
    EXPECT_EQ(s->memory.holders[0].bytes, std::max<int64_t>(4000, s->memory.peak.bytes - 8000));
    int64_t shown = 0;  // in the timeline
    for (const TraceCounterTrack& track : SimulationTimeline(*s).counters) {
      for (const TraceCounter& sample : track.samples) shown = std::max(shown, static_cast<int64_t>(sample.value));
    }
    EXPECT_EQ(shown, s->memory.peak.bytes);
    // The events of all storages tell the same.
    Result<std::vector<MemoryEvent>> events =
        MemoryEvents(*s->lowered, s->output.ranks[0].start_ps, s->output.ranks[0].end_ps, 0);
    EXPECT_TRUE(events.ok()) << ErrorOf(events);
    int64_t live = 0, most = 0;
    std::map<int64_t, int64_t> bytes;  // by storage
    for (const MemoryEvent& e : *events) {
      if (e.allocate) bytes[e.storage] = e.bytes;
      most = std::max(most, live += e.allocate ? e.bytes : -bytes[e.storage]);
    }
    EXPECT_EQ(live, 0);
    EXPECT_EQ(most, s->memory.peak.bytes);
    return s->memory.peak.bytes;
  };
  EXPECT_EQ(peak("f0 b0 f1 b1 f2 b2 f3 b3 "), 8000);
  EXPECT_EQ(peak("f0 f1 b0 f2 b1 f3 b2 b3 "), 12000);
  EXPECT_EQ(peak("f0 f1 f2 f3 b0 b1 b2 b3 "), 20000);
}

}  // namespace
}  // namespace interlace
