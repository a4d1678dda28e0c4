// planner_speed.cc — how many strategies a second the planner's evaluator computes, and how long the frontiers of a
// whole model take. Build and run: cmake --build build/core --target planner_speed && build/core/planner_speed
//
// Layer costs come from closed formulas (plan/testing/table_layers.h), so only the planner's own time is measured.
// Times are wall clock and processor time of all threads; on a busy machine divide by the second.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <thread>

#include "plan/stage_parts.h"
#include "plan/testing/table_layers.h"
#include "plan/tune.h"

namespace {

using namespace interlace;
using namespace interlace::plan;

struct Watch {
  std::chrono::steady_clock::time_point wall = std::chrono::steady_clock::now();
  std::clock_t cpu = std::clock();
  double Wall() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - wall).count(); }
  double Cpu() const { return static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC; }
};

StageModel Model(const char* cluster_name, const testing::GptLayers& layers, int64_t batch) {
  ClusterSpec cluster = *ParseCluster(*PresetCluster(cluster_name), cluster_name);
  StageOptions options;
  options.global_batch = batch;
  options.device_bytes = cluster.MemoryLimitBytes() * 9 / 10;
  options.host_bytes = int64_t{768} << 30;
  return std::move(*StageModel::Create(layers, cluster, options));
}

void Points(const StageModel& model, bool ends) {
  std::vector<Strategy> strategies;
  for (int32_t zero = 0; zero < 4; ++zero) {
    for (int32_t layers = 1; layers <= 12; ++layers) {
      for (int32_t full = 0; full <= layers; full += 2) {
        for (int code = 0; code < 6 * 6 * 6 * 6; ++code) {
          Strategy s;
          s.layers = layers, s.full = full, s.zero = zero, s.dp = 4, s.tp = 2, s.micro_batch = 2, s.micro_batches = 64,
          s.in_flight = 4;
          s.embedding = s.head = ends;
          s.weights_out = static_cast<float>(code % 6) / 5, s.gradients_out = static_cast<float>(code / 6 % 6) / 5;
          s.states_out = static_cast<float>(code / 36 % 6) / 5, s.activations_out = static_cast<float>(code / 216) / 5;
          strategies.push_back(s);
        }
      }
    }
  }
  Watch watch;
  size_t points = 0;
  volatile double sum = 0;  // so that they are computed
  while (watch.Wall() < 0.5) {
    for (const Strategy& s : strategies) {
      const StageParts& parts = *model.state().Find(s);
      sum = sum + TimesOf(parts, s).total_us + static_cast<double>(CountBytes(parts, s).peak_forward);
    }
    points += strategies.size();
  }
  std::printf("evaluator  %-22s %5.1f M points a second of one core\n", ends ? "with embedding, head" : "blocks",
              static_cast<double>(points) / watch.Cpu() / 1e6);
}

// Exact frontiers of keys spread over all that a pipeline over equal devices can ask for; a search computes only what
// it needs.
void Frontiers(const char* name, const StageModel& model, int32_t blocks, int32_t devices, int64_t batch) {
  std::vector<StageKey> keys;
  for (int32_t n = 1; n <= devices; n *= 2) {
    const int32_t stages = devices / n;
    for (int64_t g = 1; g <= batch; ++g) {
      if (batch % g != 0) continue;
      for (int32_t index = 0; index < stages; ++index) {
        const auto in_flight = static_cast<int32_t>(std::min<int64_t>(stages - index, g));
        for (int32_t layers = 1; layers <= blocks - stages + 1; ++layers) {
          if (stages == 1 && layers != blocks) continue;
          StageKey key{layers, index == 0, index + 1 == stages, n, static_cast<int32_t>(g), in_flight};
          keys.push_back(key);
        }
      }
    }
  }
  std::sort(keys.begin(), keys.end(), [](const StageKey& a, const StageKey& b) {
    return std::tie(a.devices, a.micro_batches, a.layers, a.embedding, a.head, a.in_flight) <
           std::tie(b.devices, b.micro_batches, b.layers, b.embedding, b.head, b.in_flight);
  });
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  const size_t all = keys.size(), stride = std::max<size_t>(all / 60, 1);
  for (size_t i = 0; i * stride < all; ++i) keys[i] = keys[i * stride];
  keys.resize((all + stride - 1) / stride);
  Watch watch;
  std::atomic<size_t> next{0}, points{0}, filled{0};
  std::atomic<size_t> most{0};
  auto work = [&] {
    for (size_t i = next++; i < keys.size(); i = next++) {
      const Frontier frontier = model.FrontierOf(keys[i]);
      points += frontier.size(), filled += frontier.empty() ? 0 : 1;
      size_t known = most;
      while (frontier.size() > known && !most.compare_exchange_weak(known, frontier.size())) {
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) threads.emplace_back(work);
  for (std::thread& t : threads) t.join();
  std::printf(
      "frontiers  %-22s %6zu keys of %zu, %zu with a plan, %zu points (at most %zu): %.2f s, %.2f s of processor "
      "time\n",
      name, keys.size(), all, filled.load(), points.load(), most.load(), watch.Wall(), watch.Cpu());
}

// The whole search, full space.
void Tuning(const char* name, const char* cluster_name, const testing::GptLayers& layers, int64_t batch) {
  ClusterSpec cluster = *ParseCluster(*PresetCluster(cluster_name), cluster_name);
  TuneOptions options;
  options.space = FullSpace();
  options.global_batch = batch;
  options.sequence = layers.sequence;
  options.time_limit_s = 100;
  Watch watch;
  Result<TuneResult> result = Tune(layers, cluster, options);
  if (!result.ok() || result->plans.empty()) {
    std::printf("tuning     %-22s no plan: %s\n", name, ErrorOf(result).c_str());
    return;
  }
  const Plan& best = result->plans[0];
  std::printf(
      "tuning     %-22s %.2f s, %.2f s of processor time; %zu stages, G %d, %.3f s a step (bound %.3f); %lld "
      "frontiers, %lld points, "
      "%lld of %lld (G, S) solved, %lld checks\n",
      name, watch.Wall(), watch.Cpu(), best.stages.size(), best.micro_batches(), best.step_us / 1e6,
      result->bound_us / 1e6, static_cast<long long>(result->frontiers), static_cast<long long>(result->points),
      static_cast<long long>(result->pairs_solved), static_cast<long long>(result->pairs),
      static_cast<long long>(result->checks));
}

}  // namespace

int main(int argc, char** argv) {
  const testing::GptLayers gpt22(6144, 48, 48), gpt1(2048, 32, 24);
  const StageModel l4 = Model("l4-24gb-32", gpt22, 512);
  for (bool ends : {false, true}) Points(l4, ends);
  if (argc > 1 && std::strcmp(argv[1], "points") == 0) return 0;
  Tuning("GPT-1.3B on 2 L4", "l4-24gb-2", gpt1, 64);
  Tuning("GPT-22B on 32 L4", "l4-24gb-32", gpt22, 512);
  Tuning("70B on 64 H100", "h100-80gb-64", testing::GptLayers(8192, 64, 80), 1024);
  if (argc > 1 && std::strcmp(argv[1], "tuning") == 0) return 0;
  Frontiers("GPT-1.3B on 2 L4", Model("l4-24gb-2", gpt1, 64), 24, 2, 64);
  Frontiers("GPT-22B on 32 L4", l4, 48, 32, 512);
}
