// What a seed stands for (faults.h).
#include <algorithm>
#include <sstream>

#include "transport/testing/faults.h"

namespace interlace {

namespace {

constexpr int64_t kGreetingBytes = 64;

FaultCase::Op DrawOp(Draw& draw, int size, bool small) {
  using Op = FaultCase::Op;
  Op op;
  op.kind = static_cast<Op::Kind>(draw.Below(Op::kSend + 1));
  if (op.kind == Op::kGridReduce && size != 4) op.kind = Op::kAllReduce;
  const DType types[] = {DType::kI32, DType::kF32, DType::kU8};
  op.dtype = types[draw.Below(3)];
  op.elements = draw.OfAnySize(small ? 200 : 1500);
  if (op.kind == Op::kAllReduce && !small && draw.OneIn(3)) {  // in two rounds
    op.dtype = DType::kI32;
    op.elements = draw.Between(16'000, 24'000);
  }
  if (draw.OneIn(20) && op.kind != Op::kSend) op.elements = 0;
  op.root = static_cast<int>(draw.Below(size));
  op.to = (op.root + static_cast<int>(draw.Between(1, size - 1))) % size;
  for (int rank = 0; rank < size; ++rank) op.compute_ns.push_back(draw.OneIn(3) ? draw.Below(3 * kMs) : 0);
  return op;
}

StreamFault DrawStreamFault(Draw& draw, int size, double timeout_s) {
  StreamFault fault;
  fault.kind = static_cast<StreamFault::Kind>(draw.Below(StreamFault::kVanish + 1));
  fault.from = static_cast<int>(draw.Below(size));
  fault.to = (fault.from + static_cast<int>(draw.Between(1, size - 1))) % size;
  fault.at = draw.OfAnySize(20'000) - 1;
  if (!draw.OneIn(10) && fault.from > fault.to) fault.at += kGreetingBytes;
  fault.bytes = draw.OfAnySize(300);
  fault.delay_ns = draw.Below(static_cast<int64_t>(timeout_s * 0.3e9));
  return fault;
}

}  // namespace

FaultCase DrawCase(uint64_t seed) {
  Draw draw(seed);
  FaultCase one;
  one.seed = seed;
  one.size = static_cast<int>(draw.Between(2, 5));
  const double timeouts[] = {1, 1, 3, 10, 30};
  one.timeout_s = timeouts[draw.Below(5)];
  one.window = static_cast<size_t>(draw.OneIn(2) ? 1 : draw.Between(2, 5));
  one.keyed = draw.OneIn(4);
  one.strangers = draw.OneIn(5) ? static_cast<int>(draw.Between(1, 3)) : 0;

  const int64_t latencies[] = {5'000, 50'000, 200'000, 2 * kMs, 10 * kMs};
  one.network.latency_ns = latencies[draw.Below(5)];
  one.network.jitter_ns = draw.OneIn(2) ? draw.Below(2 * one.network.latency_ns) : 0;
  const int64_t buffers[] = {300, 4 << 10, 64 << 10, 1 << 20};
  one.network.buffer_bytes = buffers[draw.Below(4)];
  const bool small = one.network.buffer_bytes < (64 << 10) && one.network.latency_ns > 100'000;
  one.network.short_counts = draw.OneIn(3);
  one.network.interrupts = draw.OneIn(3);

  const int64_t count = draw.Between(1, 10);
  for (int64_t i = 0; i < count; ++i) one.ops.push_back(DrawOp(draw, one.size, small));
  if (draw.OneIn(3)) {  // one rank has more to do than the others
    one.ops[draw.Below(count)].compute_ns[draw.Below(one.size)] = draw.Below(150 * kMs);
  }
  // The last one is everybody's: nobody ends well before it when another has failed.
  one.ops.push_back(DrawOp(draw, one.size, true));
  one.ops.back().kind = FaultCase::Op::kGather;

  one.kind = static_cast<FaultCase::Kind>(std::min<int64_t>(draw.Below(FaultCase::kSeparate + 4), FaultCase::kSeparate + 2));
  if (one.kind > FaultCase::kSeparate) one.kind = FaultCase::kStream;
  one.fault = DrawStreamFault(draw, one.size, one.timeout_s);
  one.culprit = one.fault.from;
  one.other = one.fault.to;
  one.when_ns = draw.OfAnySize(draw.OneIn(2) ? 20 * kMs : 300 * kMs);
  one.for_ns = draw.Below(400 * kMs);
  if (one.size > 2 && draw.OneIn(3)) one.second_ns = one.when_ns + draw.OfAnySize(300 * kMs);
  const int64_t cuts = draw.Below(3);
  one.cuts_data = cuts != 1;
  one.cuts_control = cuts != 0;
  if (draw.OneIn(5)) {  // and a note that tells of it is damaged
    StreamFault& note = one.note_fault.emplace(DrawStreamFault(draw, one.size, 1));
    note.kind = static_cast<StreamFault::Kind>(draw.Below(StreamFault::kDelay));
    note.control = true;
    note.at = draw.Below(sizeof(Note)) + (note.from > note.to ? kGreetingBytes : 0);
  }
  one.leaves_at = static_cast<size_t>(draw.Below(count));
  return one;
}

std::string FaultCase::Text() const {
  const char* kinds[] = {"no fault", "stream", "cut", "kill", "leave", "stall", "hiccup", "cut off", "separate"};
  std::ostringstream out;
  out << "seed " << seed << ": " << size << " ranks, " << ops.size() << " operations, " << window << " at once, timeout "
      << timeout_s << " s, latency " << network.latency_ns / 1000 << " us, buffers of " << network.buffer_bytes
      << (keyed ? ", keyed" : "") << (network.short_counts ? ", short counts" : "")
      << (network.interrupts ? ", interrupts" : "") << ", " << strangers << " strangers; " << kinds[kind];
  if (kind == kStream) {
    const char* changes[] = {"flip", "drop", "insert", "repeat", "reorder", "delay", "half-close", "vanish"};
    out << " " << changes[fault.kind] << " " << fault.from << " -> " << fault.to << " at byte " << fault.at << " ("
        << fault.bytes << " bytes, " << fault.delay_ns / 1000 << " us)";
  } else if (kind != kNone) {
    out << ": rank " << culprit << " (and " << other << ") at " << when_ns / 1000 << " us for " << for_ns / 1000 << " us";
  }
  if (note_fault) out << "; a note from " << note_fault->from << " to " << note_fault->to << " is damaged";
  for (size_t i = 0; i < ops.size(); ++i) {
    const char* names[] = {"gather", "reduce", "grid", "all-reduce", "all-to-all", "broadcast", "send"};
    out << "\n  op " << i << ": " << names[ops[i].kind] << " of " << ops[i].elements << " elements";
    if (ops[i].kind >= Op::kBroadcast) out << ", root " << ops[i].root << ", to " << ops[i].to;
  }
  return out.str();
}

}  // namespace interlace
