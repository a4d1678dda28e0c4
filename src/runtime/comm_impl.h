// comm_impl.h — the three implementations behind Comm::Create, and what they share.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "runtime/comm.h"

namespace interlace {

enum class CommKind { kGather, kReduce, kAllReduce };

// One rank alone: copies where places differ, nothing where they do not. Any device.
std::unique_ptr<Comm> MakeLocalComm(const AxisSpec& spec);
// The process group's own collectives (NCCL and its like); on return from Wait the current stream waits for the result.
Result<std::unique_ptr<Comm>> MakeNativeComm(const AxisSpec& spec, double timeout_s);
// Transfers between each two ranks over TCP (comm_mesh.h).
Result<std::unique_ptr<Comm>> MakeSocketComm(const AxisSpec& spec, double timeout_s);

// Error: tensors that are not contiguous, of different dtypes or sizes, or that overlap where they must not.
Status CheckCollective(CommKind kind, const AxisSpec& spec, const std::vector<at::Tensor>& inputs,
                       const std::vector<at::Tensor>& outputs, const std::string& label);

// out[j] = ((parts[0][j] + parts[1][j]) + parts[2][j]) + ... for j < numel: the sum in rank order. 16-bit floats are
// added in float32 and rounded once, integers wrap around. out may be one of the parts. CanSum(dtype) must hold.
bool CanSum(c10::ScalarType dtype);
void SumInOrder(c10::ScalarType dtype, const std::vector<const void*>& parts, void* out, int64_t numel);

}  // namespace interlace
