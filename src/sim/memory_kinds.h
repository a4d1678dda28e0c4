// memory_kinds.h — what the bytes of the memory curve (memory_curve.h) are for.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "sim/memory_curve.h"

namespace interlace {

using BytesByKind = std::array<int64_t, kMemoryKinds>;

struct KindHolder {
  MemoryKind kind = MemoryKind::kParameters;
  std::string module;
  int64_t bytes = 0;
  int64_t storages = 0;
};

struct MemoryKinds {
  // By distinct phase and place, while that op runs; the sum over kinds is MemoryCurve::at_op.
  std::vector<std::vector<BytesByKind>> at_op;
  // What lives at the peak, by kind and module, largest first.
  std::vector<KindHolder> at_peak;
};

// By value; meaningful for roots.
std::vector<MemoryKind> KindsOfRoots(const Lowered& program);

// `curve` is that of the same program: its errors are the only ones.
Result<MemoryKinds> ComputeMemoryKinds(const Lowered& program, const MemoryCurve& curve);

}  // namespace interlace
