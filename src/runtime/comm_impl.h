// comm_impl.h — the two implementations behind Comm::Create, and what they share.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "runtime/comm.h"

namespace interlace {

enum class CommKind { kGather, kReduce, kAllReduce, kAllToAll, kBroadcast, kSend, kRecv };

// The process group's own collectives (NCCL and its like); on return from Wait the current stream waits for the result.
Result<std::unique_ptr<Comm>> MakeNativeComm(const AxisSpec& spec, double timeout_s);
// Transfers between each two ranks over TCP (the room transport).
Result<std::unique_ptr<Comm>> MakeTcpComm(const AxisSpec& spec, double timeout_s);

// Error: tensors that are not contiguous, of different dtypes or sizes, or that overlap where they must not.
Status CheckCollective(CommKind kind, const AxisSpec& spec, const std::vector<at::Tensor>& inputs,
                       const std::vector<at::Tensor>& outputs, const std::string& label);

}  // namespace interlace
