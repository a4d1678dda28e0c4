#include "sim/testing/random_step.h"

#include <algorithm>
#include <string>
#include <vector>

namespace interlace {
namespace {

class Maker {
 public:
  explicit Maker(std::mt19937& random) : random_(random) {}

  Program Run() {
    program_.level = Level::kScheduled;
    int64_t ranks = int64_t{1} << Pick(4);
    program_.mesh.push_back({"dp", ranks});
    program_.groups = {{0, "sgd"}};
    program_.modules = {{0, "", "Net"}, {1, "a", "Linear"}, {2, "b", "Linear"}};
    for (int i = 0, n = 1 + Pick(4); i < n; ++i) {
      Unit unit;
      unit.id = i;
      unit.axis = "dp";
      unit.shard = 32 * (1 + Pick(64));
      unit.numel = unit.shard * ranks;
      program_.units.push_back(unit);
      shards_.push_back(program_.AddState(i, "shard", Flat(unit.shard), true));
      grads_.push_back(program_.AddState(i, "grad", Flat(unit.shard), false));
    }
    ValueId input = program_.AddValue(ValueKind::kInput, Flat(64 + Pick(4000))).id;
    program_.inputs.push_back({input, "x"});
    static constexpr const char* kOne[] = {"micro_batch"};
    static constexpr const char* kMany[] = {"micro_batch.first", "micro_batch.middle", "micro_batch.last"};
    program_.accumulation = 1 + Pick(4);
    std::vector<std::string> names(std::begin(kOne), std::end(kOne));
    if (program_.accumulation > 1) names.assign(std::begin(kMany), std::end(kMany));
    if (program_.accumulation == 2) names.erase(names.begin() + 1);
    // One gather and one value go from phase to phase, and from the update round to the first, in some programs.
    hand_on_ = Pick(2) == 0;
    for (const std::string& name : names) MicroBatch(name, input);
    Update();
    for (size_t i = 0; i < names.size() && names.size() > 1; ++i) {
      const bool last = i + 1 == names.size();
      program_.order.push_back({names[i], last ? program_.accumulation - 1 : static_cast<int64_t>(i),
                                i == 1 && !last ? program_.accumulation - 2 : 1});
    }
    if (!program_.order.empty()) program_.order.push_back({"update"});
    return std::move(program_);
  }

 private:
  int Pick(int n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }
  Type Flat(int64_t elements) { return Type{DType::kF32, {Dim(elements)}, {Dim(1)}}; }

  Op& Add(std::string name) {
    Op& op = program_.AddOp(std::move(name));
    op.part = static_cast<Part>(1 + Pick(2));
    op.module = Pick(3);
    program_.phases.back().ops.push_back(op.id);
    return op;
  }
  // Starts a transfer of `source` and gives its result.
  ValueId Start(const char* name, ValueId source, int64_t elements, int unit) {
    Op& op = Add(name);
    op.args.push_back(Arg::Of(source));
    if (unit >= 0) op.units.push_back(unit);
    return program_.AddResult(op, Flat(elements));
  }
  void Wait(const char* name, ValueId value) { Add(name).args.push_back(Arg::Of(value)); }
  int64_t Elements(ValueId id) { return program_.value(id).type.sizes[0].value; }

  struct Pending {
    std::string wait;
    ValueId value;
    int unit;
  };

  void MicroBatch(const std::string& name, ValueId input) {
    program_.phases.push_back({name, {}, {}, {}});
    std::vector<ValueId> ready = {input};
    std::vector<Pending> pending;
    std::vector<std::pair<int, ValueId>> gathered;  // unit, full buffer
    std::vector<bool> busy(program_.units.size(), false);
    if (hand_on_) {
      ValueId taken = program_.AddValue(ValueKind::kTake, Flat(program_.units[0].numel)).id;
      ValueId plain = program_.AddValue(ValueKind::kTake, Flat(77)).id;
      program_.phases.back().takes = {taken, plain};
      pending.push_back({"gather.wait", taken, 0});
      ready.push_back(plain);
      busy[0] = true;
    }
    for (int step = 0, n = 3 + Pick(40); step < n; ++step) {
      int unit = Pick(static_cast<int>(program_.units.size()));
      switch (Pick(9)) {
        case 0:
          if (busy[unit]) break;
          busy[unit] = true;
          pending.push_back(
              {"gather.wait", Start("gather.start", shards_[unit], program_.units[unit].numel, unit), unit});
          break;
        case 1:
          Finish(pending, ready, gathered);
          break;
        case 2: {
          Op& flat = Add("grad.begin");
          flat.units.push_back(unit);
          ValueId source = program_.AddResult(flat, Flat(program_.units[unit].numel));
          pending.push_back({"reduce.wait", Start("reduce.start", source, program_.units[unit].shard, unit), -1});
          break;
        }
        case 3:
          Offload(pending, ready, gathered);
          break;
        case 4:
          Reload(pending);
          break;
        case 5: {
          if (gathered.empty()) break;
          auto [which, value] = gathered.back();
          gathered.pop_back();
          Op& op = Add("release");
          op.args.push_back(Arg::Of(value));
          busy[which] = false;
          ready.erase(std::find(ready.begin(), ready.end(), value));
          break;
        }
        default: {
          Op& op = Add("aten.add.Tensor");
          op.args.push_back(Arg::Of(ready[Pick(static_cast<int>(ready.size()))]));
          op.args.push_back(Arg::Of(ready[Pick(static_cast<int>(ready.size()))]));
          ready.push_back(program_.AddResult(op, Flat(1 + Pick(Pick(2) == 0 ? 50 : 20000))));
        }
      }
    }
    while (!pending.empty() || !out_.empty()) {
      Reload(pending);
      Finish(pending, ready, gathered);
    }
    for (auto [unit, value] : gathered) Add("release").args.push_back(Arg::Of(value));
    if (hand_on_) HandOn();
  }

  // A result goes out, and nothing uses it until it is back; not a gathered buffer, which may be released on its way.
  void Offload(std::vector<Pending>& pending, std::vector<ValueId>& ready,
               const std::vector<std::pair<int, ValueId>>& gathered) {
    const ValueId value = ready[Pick(static_cast<int>(ready.size()))];
    if (program_.value(value).kind != ValueKind::kResult) return;
    for (auto [unit, full] : gathered) {
      if (full == value) return;
    }
    std::erase(ready, value);
    Wait("offload.start", value);
    pending.push_back({"offload.wait", value, -1});
  }

  void Reload(std::vector<Pending>& pending) {
    if (out_.empty()) return;
    const ValueId value = out_.back();
    out_.pop_back();
    Wait("reload.start", value);
    pending.push_back({"reload.wait", value, -1});
  }

  void Finish(std::vector<Pending>& pending, std::vector<ValueId>& ready,
              std::vector<std::pair<int, ValueId>>& gathered) {
    if (pending.empty()) return;
    size_t at = static_cast<size_t>(Pick(static_cast<int>(pending.size())));
    Pending done = pending[at];
    pending.erase(pending.begin() + static_cast<int64_t>(at));
    Wait(done.wait.c_str(), done.value);
    (done.wait == "offload.wait" ? out_ : ready).push_back(done.value);
    if (done.unit >= 0) gathered.emplace_back(done.unit, done.value);
  }

  void HandOn() {
    ValueId gather = Start("gather.start", shards_[0], program_.units[0].numel, 0);
    ValueId plain = program_.AddResult(Add("aten.zeros"), Flat(77));
    program_.phases.back().gives = {gather, plain};
  }

  void Update() {
    program_.phases.push_back({"update", {}, {}, {}, PhaseKind::kStep});
    if (hand_on_) {
      ValueId taken = program_.AddValue(ValueKind::kTake, Flat(program_.units[0].numel)).id;
      ValueId plain = program_.AddValue(ValueKind::kTake, Flat(77)).id;
      program_.phases.back().takes = {taken, plain};
      Wait("gather.wait", taken);
      Add("release").args.push_back(Arg::Of(taken));
    }
    for (const Unit& unit : program_.units) {
      Op& op = Add("update.sgd");
      op.part = Part::kUpdate;
      op.units.push_back(unit.id);
      op.args = {Arg::Of(shards_[unit.id]), Arg::Of(grads_[unit.id])};
      op.SetAttr("scale", Arg::Float(1.0));
      op.SetAttr("ranges", Arg::List({Arg::Int(0), Arg::Int(unit.numel), Arg::Int(0)}));
    }
    if (hand_on_) HandOn();
  }

  std::mt19937& random_;
  Program program_;
  std::vector<ValueId> shards_, grads_;
  std::vector<ValueId> out_;  // storages in the tier
  bool hand_on_ = false;
};

}  // namespace

Program RandomStep(std::mt19937& random) {
  return Maker(random).Run();
}

}  // namespace interlace
