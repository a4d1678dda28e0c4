// recorder.h — what every op and every transfer of one step did: begin and end on the steady clock, memory, processor
// time.
//
// Filled only while Executor::SetTrace asks for it, into a buffer that is as large as the step before it starts; a step
// that is not traced runs another loop and pays nothing. Times are the raw clock's nanoseconds: all ranks of one host
// share it.
//
//   samples    |mm |gather.start|mm ....|gather.wait   |mm |      one per executed op, on the compute lane
//   transfers       |........|===== gather u1 ======|             queued, begun, ended (comm.h: Times)
#pragma once

#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "ir/program.h"
#include "runtime/comm.h"
#include "trace/timeline.h"

namespace interlace {

// kSerial: every collective is completed by the op that starts it, after all ranks have met: ops and collectives are
// timed alone, in the state of caches and memory that the step leaves them. What `interlace profile` runs.
enum class TraceMode : uint8_t { kOff, kOn, kSerial };

struct OpSample {
  OpId op = kNone;
  int32_t run = 0;  // number of the phase run within the step
  int64_t begin_ns = 0, end_ns = 0;
  int64_t cpu_ns = 0;       // processor time: of this thread, of the whole process for a collective; serial mode only
  int64_t live_before = 0;  // counted bytes, persistent ones not included
  int64_t peak_bytes = 0;   // highest while the op ran, likewise
};

struct TransferSample {
  OpId op = kNone;
  int32_t run = 0;
  Comm::Times times;
  Comm* comm = nullptr;
  Ticket ticket = 0;
};

struct StepRecord {
  TraceMode mode = TraceMode::kOff;
  std::vector<const Phase*> phases;       // by run
  std::vector<OpSample> samples;          // in order of execution
  std::vector<TransferSample> transfers;  // in order of issue
  int64_t persistent_bytes = 0;
  int64_t begin_ns = 0, end_ns = 0;
};

// The step as a timeline of `rank` whose zero is `origin_ns` on the clock. Ops that only change bookkeeping (views) are
// left out when they take no time worth drawing (below 1 us).
Timeline TimelineOf(const Program& program, const StepRecord& record, int32_t rank, int64_t world_size,
                    int64_t origin_ns);

}  // namespace interlace
