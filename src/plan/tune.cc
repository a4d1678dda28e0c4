#include "plan/tune.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <queue>

#include "base/sort.h"
#include "plan/frontiers.h"
#include "plan/pair_bound.h"
#include "plan/recurrence.h"
#include "plan/tune_state.h"

namespace interlace::plan {
namespace {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();
constexpr size_t kSeeds = 48;     // plans tried before the search
constexpr double kCoarse = 1e-3;  // precision while some frontiers are still bounds

class Tuner {
 public:
  Tuner(const LayerSource& layers, const ClusterSpec& cluster, const TuneOptions& options, Frontiers& frontiers,
        double sample_bytes)
      : layers_(layers),
        cluster_(cluster),
        o_(options),
        frontiers_(frontiers),
        sample_bytes_(sample_bytes),
        begin_(std::chrono::steady_clock::now()),
        bounds_(frontiers),
        best_(options.top) {}

  Result<TuneResult> Run() {
    pairs_ = PairsOf(o_.space, layers_.blocks(), cluster_, o_.global_batch);
    out_.pairs = static_cast<int64_t>(pairs_.size());
    if (o_.warm != nullptr) INTERLACE_TRY(Warm(*o_.warm));
    if (best_.found().empty()) INTERLACE_TRY(Seed());
    INTERLACE_TRY(Search());
    out_.bound_us = Bound();
    out_.complete = std::all_of(pairs_.begin(), pairs_.end(), [](const Pair& p) { return p.done; });
    out_.frontiers = frontiers_.computed();
    out_.points = frontiers_.points();
    for (const FoundPlan& found : best_.found()) out_.plans.push_back(MakePlan(found));
    return std::move(out_);
  }

 private:
  bool Late() const {
    return o_.time_limit_s > 0 &&
           std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count() > o_.time_limit_s;
  }
  // What costs as much or more is of no use.
  double Cutoff() const { return best_.Last() * (1 - o_.tolerance); }
  double Bound() const {
    double bound = best_.First() * (1 - o_.tolerance);
    for (const Pair& pair : pairs_) {
      if (!pair.done) bound = std::min(bound, pair.bound_us);
    }
    return bound;
  }
  TuneProgress Progress() const {
    double bound = Bound();
    return {done_, out_.pairs, frontiers_.computed(), best_.found().empty() ? 0 : best_.First(),
            std::isfinite(bound) ? bound : 0};
  }

  InterStageProblem Problem(const Pair& pair) {
    InterStageProblem p;
    p.stages = pair.stages, p.layers = layers_.blocks(), p.micro_batches = pair.micro_batches;
    p.devices = static_cast<int32_t>(cluster_.devices), p.per_node = static_cast<int32_t>(cluster_.per_node);
    p.counts = pair.counts;
    p.one_layout = o_.space.one_layout, p.one_tp = o_.space.one_tp;
    if (o_.space.layer_slack >= 0) {
      p.fewest_layers = std::max(p.layers / p.stages - o_.space.layer_slack, 1);
      p.most_layers = (p.layers + p.stages - 1) / p.stages + o_.space.layer_slack;
    }
    p.frontier = [this](const StageKey& key) -> const Frontier& { return frontiers_.Of(key); };
    return p;
  }
  void AddBoundaries(InterStageProblem& p) const {
    double bytes = sample_bytes_ * static_cast<double>(o_.global_batch) / p.micro_batches;
    p.boundary_us = [this, bytes](const Layout& from, const Layout& to, bool inside) {
      return BoundaryUs(cluster_, bytes, from, to, inside);
    };
  }
  InterStageOptions Options(double precision) const {
    InterStageOptions options{.top = o_.top, .cutoff_us = Cutoff(), .precision = precision};
    options.stop = [this] { return Late(); };
    return options;
  }
  static StageKey KeyOf(const InterStageProblem& p, const InterStagePlan& plan, int32_t stage) {
    const Strategy& s = plan.stages[stage].point.strategy;
    return {s.layers,    stage == 0,      stage == p.stages - 1,
            s.dp * s.tp, p.micro_batches, std::min(p.stages - stage, p.micro_batches)};
  }

  // Always the pair of the least bound: its bound is made better, then it is solved. While there is no plan at all, a
  // pair is solved at once, so that what follows has something to beat.
  Status Search() {
    auto later = [&](size_t a, size_t b) {
      return pairs_[a].bound_us != pairs_[b].bound_us ? pairs_[a].bound_us > pairs_[b].bound_us : a > b;
    };
    std::priority_queue<size_t, std::vector<size_t>, decltype(later)> open(later);
    for (size_t i = 0; i < pairs_.size(); ++i) {
      pairs_[i].bound_us = bounds_.LeastUs(Problem(pairs_[i]));
      open.push(i);
    }
    while (!open.empty() && !Late()) {
      const size_t index = open.top();
      open.pop();
      Pair& pair = pairs_[index];
      if (pair.bound_us < Cutoff() && !pair.bounded) {
        if (bounds_.NoneBeats(Problem(pair), Cutoff())) {
          pair.bound_us = Cutoff();
        } else {
          INTERLACE_TRY(BoundPair(pair));
        }
        if (Cutoff() < kUnbounded && pair.bound_us < Cutoff()) {
          open.push(index);
          continue;
        }
      }
      if (pair.bound_us >= Cutoff()) {
        pair.done = true;
      } else {
        ++out_.pairs_solved;
        INTERLACE_TRY(SolvePair(pair));
      }
      ++done_;
      if (o_.progress) o_.progress(Progress());
    }
    return Ok{};
  }

  // With bounds for all stages that nothing better is known of.
  Status BoundPair(Pair& pair) {
    InterStageProblem p = Problem(pair);
    p.one_layout = p.one_tp = false;
    InterStageOptions options = Options(0.01);
    options.top = 1;
    INTERLACE_ASSIGN(InterStageResult result, SolveInterStage(p, options));
    out_.checks += result.checks;
    pair.bound_us = std::max(pair.bound_us, result.bound_us);
    pair.bounded = true;
    return Ok{};
  }

  Status SolvePair(Pair& pair) {
    InterStageProblem p = Problem(pair);
    if (p.one_layout) {
      std::vector<StageKey> keys;
      for (int32_t i = 0; i < p.stages; ++i) {
        for (int32_t l = p.fewest_layers; l <= std::min(p.most_layers, p.layers - (p.stages - 1) * p.fewest_layers);
             ++l) {
          keys.push_back(
              {l, i == 0, i == p.stages - 1, p.counts[0], p.micro_batches, std::min(p.stages - i, p.micro_batches)});
        }
      }
      frontiers_.Compute(std::move(keys), Cutoff() / p.micro_batches, [this] { return Late(); });
      if (Late()) return Ok{};
    } else if (p.stages > 1) {
      // Boundaries left aside the problem is smaller, and most pairs end here.
      INTERLACE_ASSIGN(bool better, Narrow(pair, p, false));
      if (!better) return Ok{};
    }
    if (p.stages > 1) AddBoundaries(p);
    INTERLACE_TRY(Narrow(pair, p, true));
    return Ok{};
  }

  // Computes what the best plans use until they use nothing else; then keeps them if they are `final`. False: none is
  // better than what there is, or time is up.
  Result<bool> Narrow(Pair& pair, const InterStageProblem& p, bool final) {
    double precision = kCoarse;
    while (true) {
      INTERLACE_ASSIGN(InterStageResult result, SolveInterStage(p, Options(precision)));
      out_.checks += result.checks;
      pair.bound_us = std::max(pair.bound_us, result.bound_us * (1 - precision));
      if (!result.complete) return false;
      if (result.plans.empty()) {
        if (precision < kCoarse) {
          pair.done = true;
          return false;
        }
        precision = InterStageOptions{}.precision;
        continue;
      }
      std::vector<StageKey> missing;
      for (const InterStagePlan& plan : result.plans) {
        for (int32_t i = 0; i < p.stages; ++i) {
          StageKey key = KeyOf(p, plan, i);
          if (!frontiers_.Known(key) && std::find(missing.begin(), missing.end(), key) == missing.end())
            missing.push_back(key);
        }
      }
      if (!missing.empty()) {
        frontiers_.Compute(std::move(missing), Cutoff() / p.micro_batches, [this] { return Late(); });
        INTERLACE_TRY(TryShapes(p, result.plans.front()));
        if (Late()) return false;
        continue;
      }
      if (!final) return true;
      if (precision == kCoarse) {
        precision = InterStageOptions{}.precision;
        continue;
      }
      for (const InterStagePlan& plan : result.plans) best_.Keep(plan, p.micro_batches);
      pair.done = true;
      return true;
    }
  }

  // The best of one choice of layers and devices, now that its frontiers are known: a plan to beat.
  Status TryShapes(const InterStageProblem& p, const InterStagePlan& shapes) {
    static const Frontier kEmpty;
    InterStageProblem only = p;
    if (p.stages > 1) AddBoundaries(only);
    only.frontier = [&](const StageKey& key) -> const Frontier& {
      for (int32_t i = 0; i < p.stages; ++i) {
        if (KeyOf(p, shapes, i) == key) return frontiers_.Of(key);
      }
      return kEmpty;
    };
    InterStageOptions options = Options(1e-6);
    options.top = 1;
    INTERLACE_ASSIGN(InterStageResult result, SolveInterStage(only, options));
    out_.checks += result.checks;
    for (const InterStagePlan& plan : result.plans) best_.Keep(plan, p.micro_batches);
    return Ok{};
  }

  // Stages of equal devices and layers, those that may be fastest first: quickly found, and something to beat.
  Status Seed() {
    std::vector<std::pair<double, size_t>> order;
    for (size_t i = 0; i < pairs_.size(); ++i) {
      InterStageProblem p = Problem(pairs_[i]);
      if (p.devices % p.stages != 0 ||
          std::find(p.counts.begin(), p.counts.end(), p.devices / p.stages) == p.counts.end())
        continue;
      p.counts = {p.devices / p.stages};
      order.emplace_back(bounds_.LeastUs(p), i);
    }
    std::sort(order.begin(), order.end());
    if (order.size() > kSeeds) order.resize(kSeeds);
    for (const auto& [least_us, i] : order) {
      if (least_us >= Cutoff() || Late()) break;
      const InterStageProblem p = Problem(pairs_[i]);
      InterStagePlan shapes;
      std::vector<StageKey> keys;
      for (int32_t k = 0; k < p.stages; ++k) {
        Strategy& s = shapes.stages.emplace_back().point.strategy;
        s.layers = p.layers / p.stages + (k >= p.stages - p.layers % p.stages), s.dp = p.devices / p.stages;
      }
      for (int32_t k = 0; k < p.stages; ++k) keys.push_back(KeyOf(p, shapes, k));
      frontiers_.Compute(std::move(keys), Cutoff() / p.micro_batches, [this] { return Late(); });
      if (!Late()) INTERLACE_TRY(TryShapes(p, shapes));
    }
    return Ok{};
  }

  // A plan of before: its shapes with what their stages can do now. Micro-batches are as large as they were, or as
  // many; on a cluster of other size every stage has its share of the devices. A plan that no longer fits is no help,
  // and no harm.
  Status Warm(const Plan& plan) {
    int64_t blocks = 0, devices = 0;
    for (const PlanStage& stage : plan.stages) {
      blocks += stage.strategy.layers, devices += int64_t{stage.strategy.dp} * stage.strategy.tp;
    }
    if (blocks != layers_.blocks()) return Ok{};
    InterStagePlan shapes;
    for (const PlanStage& stage : plan.stages) {
      Strategy& s = shapes.stages.emplace_back().point.strategy;
      const int64_t mine = int64_t{stage.strategy.dp} * stage.strategy.tp * cluster_.devices;
      if (mine % devices != 0 || stage.strategy.layers < 1) return Ok{};
      s.layers = stage.strategy.layers, s.dp = static_cast<int32_t>(mine / devices);
    }
    const Strategy& first = plan.stages[0].strategy;
    const int64_t samples =
        int64_t{first.micro_batch} * first.dp * cluster_.devices;  // of a micro-batch, times the devices of before
    const int64_t whole = o_.global_batch * devices;
    for (int64_t micro_batches : {whole % samples == 0 ? whole / samples : 0, int64_t{plan.micro_batches()}}) {
      for (const Pair& pair : pairs_) {
        if (pair.micro_batches != micro_batches || pair.stages != static_cast<int32_t>(plan.stages.size())) continue;
        const InterStageProblem p = Problem(pair);
        std::vector<StageKey> keys;
        for (int32_t i = 0; i < p.stages; ++i) keys.push_back(KeyOf(p, shapes, i));
        frontiers_.Compute(std::move(keys), kUnbounded, [this] { return Late(); });
        if (Late()) return Ok{};
        INTERLACE_TRY(TryShapes(p, shapes));
        if (best_.found().empty()) continue;
        out_.warm_us = best_.First();
        return Ok{};
      }
    }
    return Ok{};
  }

  Plan MakePlan(const FoundPlan& found) const {
    Plan plan;
    plan.model = o_.model, plan.cluster = cluster_.name, plan.space = o_.space.name;
    plan.global_batch = o_.global_batch, plan.sequence = o_.sequence, plan.flash_attention = o_.flash_attention;
    int32_t block = 0;
    for (const StageChoice& choice : found.plan.stages) {
      PlanStage& stage = plan.stages.emplace_back();
      stage.strategy = choice.point.strategy;
      stage.cost = choice.point.cost;
      stage.first_block = block;
      stage.first_device = choice.first_device;
      stage.send_us = choice.boundary_us;
      stage.passes = frontiers_.ModelOf(stage.strategy.tp).PassesOf(stage.strategy);
      block += stage.strategy.layers;
    }
    plan.step_us = found.plan.cost_us;
    plan.pipeline_us = static_cast<double>(RunPipeline(PipelineStages(plan), found.micro_batches).makespan_ps) / 1e6;
    plan.bound_us = std::min(out_.bound_us, plan.step_us);
    return plan;
  }

  const LayerSource& layers_;
  const ClusterSpec& cluster_;
  const TuneOptions& o_;
  Frontiers& frontiers_;
  const double sample_bytes_;  // a sample's activation between two blocks
  const std::chrono::steady_clock::time_point begin_;
  std::vector<Pair> pairs_;
  PairBounds bounds_;
  BestPlans best_;
  TuneResult out_;
  int64_t done_ = 0;
};

Result<double> BytesOfSample(const LayerSource& layers) {
  INTERLACE_ASSIGN(LayerCost block, layers.Cost(Role::kBlock, 1, 1));
  return static_cast<double>(block.boundary);
}

}  // namespace

Result<TuneResult> Tune(const LayerSource& layers, const ClusterSpec& cluster, const TuneOptions& options) {
  if (cluster.per_node < 1 || cluster.devices % cluster.per_node != 0) {
    return MakeError("the cluster '", cluster.name, "' has uneven nodes: ", cluster.devices, " devices, ",
                     cluster.per_node, " a node; plan for whole nodes");
  }
  if (layers.blocks() < 1 || layers.blocks() > 4096 || cluster.devices > 1 << 16) {
    return MakeError("a model of ", layers.blocks(), " blocks on ", cluster.devices,
                     " devices cannot be planned; there may be 1 to 4096 blocks and 65536 devices");
  }
  if (options.global_batch < 1 || options.global_batch > 1 << 20) {
    return MakeError("a global batch of ", options.global_batch,
                     " samples cannot be planned; it must be from 1 to 1048576");
  }
  if (options.top < 1) return MakeError(options.top, " plans are none; ask for 1 or more");
  StageOptions stage = options.space.stage;
  stage.global_batch = options.global_batch;
  stage.device_bytes = DeviceBytesFor(cluster, options.device_bytes);
  stage.host_bytes = HostBytesFor(cluster, options.host_bytes);
  INTERLACE_ASSIGN(Frontiers frontiers, Frontiers::Create(layers, cluster, stage, options));
  INTERLACE_ASSIGN(double sample_bytes, BytesOfSample(layers));
  INTERLACE_ASSIGN(TuneResult result, Tuner(layers, cluster, options, frontiers, sample_bytes).Run());
  if (stage.overlap && options.space.imbalance_aware) return result;
  stage.overlap = true;
  if (!result.complete) result.bound_us = 0;  // it was of another model
  result.warm_us = 0;
  for (Plan& plan : result.plans) {
    INTERLACE_ASSIGN(plan, Reprice(plan, layers, cluster, stage));
    plan.bound_us = plan.step_us;
  }
  StableSort(result.plans, [](const Plan& a, const Plan& b) { return a.step_us < b.step_us; });
  return result;
}

}  // namespace interlace::plan
