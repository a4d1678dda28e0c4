// Regions of torch.autocast: what CUDA casts, by the lists of torch's own header.
#include <ATen/autocast_mode.h>

namespace at::autocast {  // whose names the lists have unqualified
namespace {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define SOFT_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SOFT_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SOFT_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SOFT_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(SOFT_LOWER)
  AT_FORALL_FP32(SOFT_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SOFT_FP32_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(SOFT_PROMOTE)
  m.impl("binary_cross_entropy",
         [](const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, int64_t) -> at::Tensor {
    TORCH_CHECK(false, "binary_cross_entropy is unsafe to autocast; binary_cross_entropy_with_logits is safe");
  });
}

}  // namespace
}  // namespace at::autocast
