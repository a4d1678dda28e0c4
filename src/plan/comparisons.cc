#include "plan/comparisons.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "plan/least_memory.h"

namespace interlace::plan {
namespace {

Comparison CompareWith(const Baseline& other, const LayerSource& layers, const ClusterSpec& cluster,
                       const TuneOptions& options) {
  Comparison out{.name = other.name, .what = other.help};
  Result<TuneResult> found = TuneBaseline(other, layers, cluster, options);
  if (!found.ok()) {
    out.impossible = found.error().message;
    return out;
  }
  out.complete = found->complete;
  if (!found->complete) out.bound_us = found->bound_us;
  if (!found->plans.empty()) {
    out.step_us = found->plans.front().step_us;
    return out;
  }
  Result<std::optional<LeastMemory>> least = LeastMemoryOf(other, layers, cluster, options);
  if (!least.ok()) {
    out.impossible = least.error().message;
  } else if (!*least) {
    out.impossible = "no layout of this kind divides the batch, or host memory is too small";
  } else if ((*least)->device_bytes <= options.device_bytes) {
    out.step_us = (*least)->plan.step_us;  // there was no time for a better one
  } else {
    out.least_bytes = (*least)->device_bytes;
  }
  return out;
}

}  // namespace

std::vector<Comparison> CompareAll(const std::vector<Baseline>& others, const LayerSource& layers,
                                   const ClusterSpec& cluster, const TuneOptions& options, double seconds,
                                   const std::function<void(size_t)>& begun) {
  const auto begin = std::chrono::steady_clock::now();
  const size_t cores =
      options.threads > 0 ? static_cast<size_t>(options.threads) : std::max(1u, std::thread::hardware_concurrency());
  const size_t workers = std::min(cores, others.size());
  std::vector<Comparison> out(others.size());
  std::atomic<size_t> next = 0;
  auto work = [&](bool says) {
    for (size_t i; (i = next++) < others.size();) {
      if (says && begun) begun(i);
      const double left = seconds - std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      if (left <= 0) {
        out[i] = {.name = others[i].name, .what = others[i].help, .skipped = true};
        continue;
      }
      TuneOptions mine = options;
      mine.threads = 1;
      mine.time_limit_s = left * std::min(1.0, static_cast<double>(workers) / static_cast<double>(others.size() - i));
      out[i] = CompareWith(others[i], layers, cluster, mine);
    }
  };
  std::vector<std::jthread> helpers;
  struct Stop {  // `begun` may throw: then the others end with what they have in hand
    std::atomic<size_t>& next;
    size_t end;
    ~Stop() { next = end; }
  } stop{next, others.size()};
  for (size_t i = 1; i < workers; ++i) helpers.emplace_back(work, false);
  work(true);
  helpers.clear();
  return out;
}

}  // namespace interlace::plan
