// kernels_aten.h — the forms of the kernels for devices other than CPUs, made of ATen calls. They run on CPUs too,
// where the tests compare them with the loops of our own.
#pragma once

#include <vector>

#include "runtime/kernels.h"

namespace interlace {

// Flats that one call steps, each beside its gradient and states; of one dtype.
struct AdamFlats {
  std::vector<at::Tensor> w, g, exp_avg, exp_avg_sq;
};
// `consume`: nobody reads the gradients any more, so they are scaled where they lie.
void AdamStepAten(const AdamFlats& flats, const AdamArgs& args, bool consume);
void SgdStepAten(const at::Tensor& w, const at::Tensor& g, const at::Tensor& momentum, const SgdArgs& args);
void RuleStepAten(const RuleForm& form, std::span<const at::Tensor> flats, std::span<const double> numbers,
                  double grad_scale);
// The same bits as NormPartial on a CPU: the block sums are made in the same order, the rest is integers.
void NormPartialAten(const at::Tensor& flat, const at::Tensor& acc);

// The same by the operators of device_ops.cc: a backend's own kernel, or the ATen form.
void AdamStepOnDevice(const AdamFlats& flats, const AdamArgs& args, bool consume);
void SgdStepOnDevice(const at::Tensor& w, const at::Tensor& g, const at::Tensor& momentum, const SgdArgs& args);
void NormPartialOnDevice(const at::Tensor& flat, const at::Tensor& acc);

}  // namespace interlace
