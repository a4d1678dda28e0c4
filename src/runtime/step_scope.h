// step_scope.h — the thread state of a step.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <string>

namespace interlace {

// What a step switches off in its thread: autograd, views' bookkeeping, autocast (casts are in the program), Python
// dispatch.
struct StepScope {
  explicit StepScope(c10::Device device) : device_guard(device) {}
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard others{
      c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  c10::AutoGradMode no_grad{false};
  c10::OptionalDeviceGuard device_guard;
};

// The message of an exception without torch's backtrace.
inline std::string MessageOf(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = c10_error ? c10_error->what_without_backtrace() : error.what();
  // Assertion texts go on with a backtrace or a request to report a bug; the first line says it all.
  return text.substr(0, text.find("\nException raised from"));
}

}  // namespace interlace
