#include "runtime/comm.h"

#include "runtime/comm_impl.h"

namespace interlace {

namespace {

// Bytes [begin, end) of a contiguous tensor.
struct Span {
  const char* begin;
  const char* end;
};

Span SpanOf(const at::Tensor& t) {
  const char* begin = static_cast<const char*>(t.const_data_ptr());
  return {begin, begin + t.nbytes()};
}

bool Overlap(const Span& a, const Span& b) {
  return a.begin < b.end && b.begin < a.end;
}

}  // namespace

Status CheckCollective(CommKind kind, const AxisSpec& spec, const std::vector<at::Tensor>& inputs,
                       const std::vector<at::Tensor>& outputs, const std::string& label) {
  const auto where = [&](size_t i) { return label + " on axis " + spec.name + ", tensor " + std::to_string(i) + ": "; };
  if (inputs.size() != outputs.size()) {
    return MakeError(label, " on axis ", spec.name, ": ", inputs.size(), " inputs but ", outputs.size(), " outputs");
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor &in = inputs[i], &out = outputs[i];
    if (!in.defined() || !out.defined()) return MakeError(where(i), "an undefined tensor");
    if (!in.is_contiguous() || !out.is_contiguous()) return MakeError(where(i), "tensors must be contiguous");
    if (in.scalar_type() != out.scalar_type() || in.device() != out.device()) {
      return MakeError(where(i), "input is ", c10::toString(in.scalar_type()), " on ", in.device().str(),
                       ", output is ", c10::toString(out.scalar_type()), " on ", out.device().str());
    }
    if (kind == CommKind::kAllToAll) {
      if (in.numel() != out.numel() || in.numel() % spec.size != 0)
        return MakeError(where(i), "input and output need as many elements, in ", spec.size, " equal parts");
      if (Overlap(SpanOf(in), SpanOf(out))) return MakeError(where(i), "input and output overlap");
      continue;
    }
    if (kind != CommKind::kGather && kind != CommKind::kReduce) continue;
    const bool gather = kind == CommKind::kGather;
    const at::Tensor &shard = gather ? in : out, &full = gather ? out : in;
    if (full.numel() != shard.numel() * spec.size) {
      return MakeError(where(i), "the full buffer has ", full.numel(), " elements, the shard ", shard.numel(),
                       " and the axis ", spec.size, " ranks");
    }
    const Span whole = SpanOf(full), part = SpanOf(shard);
    if (Overlap(whole, part) && part.begin != whole.begin + spec.rank * static_cast<int64_t>(shard.nbytes())) {
      return MakeError(where(i), "the shard lies inside the full buffer, but not at this rank's place");
    }
  }
  return Ok{};
}

Result<std::unique_ptr<Comm>> Comm::Create(const AxisSpec& spec, double timeout_s) {
  if (spec.size < 1 || spec.rank < 0 || spec.rank >= spec.size) {
    return MakeError("axis ", spec.name, ": rank ", spec.rank, " of ", spec.size, " is not a rank");
  }
  if (!(timeout_s > 0))
    return MakeError("axis ", spec.name, ": the timeout must be a positive number of seconds, not ", timeout_s);
  if (spec.backend == "tcp") return MakeTcpComm(spec, timeout_s);
  if (spec.backend == "nccl" || spec.backend == "native") return MakeNativeComm(spec, timeout_s);
  return MakeError("axis ", spec.name, ": backend \"", spec.backend, "\" is not supported for ", spec.size,
                   " ranks; use tcp (CPU), nccl (CUDA), or native (the process group's own collectives on any device)");
}

}  // namespace interlace
