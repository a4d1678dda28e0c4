// engine.h — the discrete-event core: lanes of every rank, links, host bandwidth and cores.
//
// The compute lane of a rank walks its ops in list order. A start puts a transfer into the queue of its lane and costs
// nothing; a transfer begins when it heads its lane on every rank of its group; a wait holds the compute lane until the
// transfer has ended. On a GPU an op cannot begin before the host has launched it (one after another).
//
//   compute |=mm=|start g1|==mm==|wait g1 ......|=mm=|
//   gather            |~~|==== g1 =============|          ~~ latency, == transfer
//
// While things run together they slow each other: interference between classes (cluster.h), transfers that use the same
// direction of the same link share it, copies share the host's bandwidth, ranks of a CPU host share its cores. On CPUs,
// where collectives are point-to-point messages on one connection, they go out in the order of issue whatever their
// lane: the first started is the first to end, and a transfer that waits behind another has its latency behind it.
// Starting one, and adding up what a reduction has received, is work of the compute lane there (OpCost::issue_ps,
// finish_ps). A message between two ranks goes when both have started it; on CPUs when its sender has, for sockets take
// it before it is asked for. Those to one rank follow one another, and wait for no others. Rates change only at events;
// between two events every running thing advances at its rate. Time is 64-bit picoseconds, rates fixed point, ties go
// to the lower rank, then to the older transfer: the same bits each time.
//
// Identical ranks are folded into one, which then stands for all that share its host.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "sim/lowered.h"

namespace interlace {

struct TransferRecord {
  const LoweredOp* op = nullptr;  // that of the rank that came first
  int32_t rank = 0;               // this one
  int64_t issued_ps = 0;          // by the last rank
  int64_t start_ps = -1;
  int64_t end_ps = -1;
  int32_t cause_rank = 0;       // the rank that came last
  int32_t cause_transfer = -1;  // what it was still doing on that lane; -1: it had just been issued
  int64_t cause_instance = -1;  // the op that issued it there
  std::vector<int32_t> members;
};

struct RankRecord {
  std::vector<int64_t> start_ps, end_ps;  // by op instance; a wait begins when it is reached
  std::vector<int32_t> waited_for;        // by instance of a wait: the transfer that ended last, or -1
  std::vector<int32_t> transfer_of;       // by instance of a start
  std::vector<int32_t> transfers;         // of this rank, in the order of issue
};

// The ops of a rank that issued `record.transfers`, in their order: of a message each end has its own.
std::vector<const LoweredOp*> IssuedOps(const Lowered& lowered, const RankRecord& record);

struct EngineInput {
  std::vector<const Lowered*> programs;  // by simulated rank
  std::vector<int64_t> compute_slow;     // by simulated rank, fixed point: kOne = as the cost model says
  int64_t fold = 1;                      // ranks of one host that each simulated rank stands for
  // One rank for all that are alike in each stage of a pipeline, in the order of the stages; `fold` is not used then.
  struct Stages {
    AxisGroup axis;                   // of the stages, on the mesh
    std::vector<int64_t> node, fold;  // by stage: the host of its first rank, and how many of its ranks are there
  };
  std::optional<Stages> stages = {};
};

struct EngineOutput {
  std::vector<RankRecord> ranks;
  std::vector<TransferRecord> transfers;
  int64_t makespan_ps = 0;  // all lanes idle
  int64_t events = 0;
};

// Error: ranks that wait for one another for ever or meet in different collectives (both named); times beyond 64 bits.
Result<EngineOutput> RunEngine(const EngineInput& input, const CostModel& model);

}  // namespace interlace
