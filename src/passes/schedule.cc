#include "passes/schedule.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/scan.h"
#include "passes/keep.h"
#include "passes/pipeline.h"
#include "passes/transfers.h"

namespace interlace {
namespace {

// Distinct places where gathers of one part are needed, ascending.
std::vector<int32_t> StepsOf(const Transfers& transfers, Part part) {
  std::vector<int32_t> steps;
  for (const Gather& gather : transfers.gathers) {
    if (gather.part == part && !gather.units.empty()) steps.push_back(gather.need);
  }
  steps.erase(std::unique(steps.begin(), steps.end()), steps.end());  // gathers are sorted by need
  return steps;
}

// Merges the gathers of each bucket and issues them so many steps ahead.
void PlaceGathers(const Program& program, Transfers& transfers, Part part,
                  const std::vector<Schedule::Bucket>& buckets) {
  const std::vector<int32_t> steps = StepsOf(transfers, part);
  if (steps.empty()) return;
  std::map<UnitId, size_t> bucket_of;
  for (size_t i = 0; i < buckets.size(); ++i) {
    for (UnitId unit : buckets[i].units) bucket_of[unit] = i;
  }
  std::vector<Gather*> first(buckets.size(), nullptr);
  const int32_t begin = part == Part::kBackward ? std::min(transfers.backward_begin(), steps[0]) : 0;
  for (Gather& gather : transfers.gathers) {
    if (gather.part != part || gather.units.empty()) continue;
    auto found = bucket_of.find(gather.units[0]);
    int32_t ahead = 0;
    if (found != bucket_of.end()) {
      Gather*& into = first[found->second];
      if (into != nullptr && MayMerge(program, into->units, gather.units)) {
        transfers.Merge(*into, gather);
        continue;
      }
      into = &gather;
      ahead = buckets[found->second].ahead;
    }
    const auto step = std::lower_bound(steps.begin(), steps.end(), gather.need) - steps.begin();
    gather.at = ahead >= Schedule::kAtOnce || ahead > step ? begin : steps[step - ahead];
    gather.order = gather.need * Transfers::kSpacing;  // in one gap: as they are needed, behind reductions
  }
}

// Whether two reductions may be one call: neither's sum is used before the other's gradients are there.
bool MayReduceTogether(const Program& program, const Reduce& a, const Reduce& b) {
  return MayMerge(program, a.units, b.units) && a.tail.empty() == b.tail.empty() &&
         std::max(a.at, b.at) <= std::min(a.latest, b.latest);
}

// Merges the reductions of each bucket, as far as they can wait for one another; each waits until so many later ones
// have started.
void PlaceReduces(const Program& program, Transfers& transfers, const std::vector<Schedule::Bucket>& buckets) {
  std::map<UnitId, size_t> bucket_of;
  for (size_t i = 0; i < buckets.size(); ++i) {
    for (UnitId unit : buckets[i].units) bucket_of[unit] = i;
  }
  std::vector<Reduce*> first(buckets.size(), nullptr);
  std::map<const Reduce*, int32_t> late;
  int64_t order_in_gap = -static_cast<int64_t>(transfers.reduces.size()) * Transfers::kSpacing;  // before gathers
  for (Reduce& reduce : transfers.reduces) {
    reduce.order = reduce.wait_order = order_in_gap;
    order_in_gap += Transfers::kSpacing;
    auto found = bucket_of.find(reduce.units[0]);
    if (found == bucket_of.end()) {
      late[&reduce] = 1;
      continue;
    }
    Reduce*& into = first[found->second];
    if (into != nullptr && MayReduceTogether(program, *into, reduce)) {
      transfers.Merge(*into, reduce);
      continue;
    }
    into = &reduce;
    late[&reduce] = buckets[found->second].ahead;
  }
  std::vector<Reduce*> order;
  for (Reduce& reduce : transfers.reduces) {
    if (!reduce.units.empty()) order.push_back(&reduce);
  }
  std::stable_sort(order.begin(), order.end(), [](const Reduce* a, const Reduce* b) {
    return std::pair(a->at, a->order) < std::pair(b->at, b->order);
  });
  for (size_t i = 0; i < order.size(); ++i) {
    Reduce& reduce = *order[i];
    if (reduce.tail.empty()) continue;
    const size_t after = i + static_cast<size_t>(std::max(late[&reduce], 0));
    if (after == i) {
      reduce.wait = reduce.at;
      reduce.wait_order = reduce.order + 1;
    } else if (after < order.size()) {
      reduce.wait = order[after]->at;
      reduce.wait_order = order[after]->order - 1;
    } else {
      reduce.wait = transfers.size();
      reduce.wait_order = static_cast<int64_t>(i);
    }
    if (reduce.wait > reduce.latest) {
      reduce.wait = reduce.latest;
      reduce.wait_order = std::max(reduce.wait_order, reduce.order + 1);
    }
    Transfers::GatherBehindTail(program, reduce);
  }
}

std::string PrintBuckets(const std::vector<Schedule::Bucket>& buckets) {
  std::string text;
  for (const Schedule::Bucket& bucket : buckets) {
    if (!text.empty()) text += ";";
    text += UnitNames(bucket.units);
    if (bucket.ahead >= Schedule::kAtOnce) {
      text += ":head";
    } else if (bucket.ahead != 0) {
      text += ":" + std::to_string(bucket.ahead);
    }
  }
  return text;
}

Result<int32_t> Number(std::string_view text, const std::string& where) {
  const std::optional<int32_t> number = ParseNumber<int32_t>(text);
  if (!number || *number < 0) return MakeError(where, ": expected a whole number, found '", text, "'");
  return *number;
}

Result<std::vector<Schedule::Bucket>> ReadBuckets(const Program& program, const PassOptions& options,
                                                  const std::string& name) {
  std::vector<Schedule::Bucket> buckets;
  const std::string text = options.Text(name, "none");
  if (text == "none") return buckets;
  std::vector<char> listed(program.units.size(), 0);
  for (std::string_view part : Split(text, ';')) {
    Schedule::Bucket bucket;
    const size_t colon = part.find(':');
    INTERLACE_ASSIGN(bucket.units, ReadUnits(program, part.substr(0, colon), "option " + name));
    if (colon != std::string_view::npos) {
      if (part.substr(colon + 1) == "head") {
        bucket.ahead = Schedule::kAtOnce;
      } else {
        INTERLACE_ASSIGN(bucket.ahead, Number(part.substr(colon + 1), "option " + name));
      }
    }
    for (UnitId unit : bucket.units) {
      if (listed[unit]++ > 0) return MakeError("option ", name, ": u", unit, " is listed twice");
    }
    buckets.push_back(std::move(bucket));
  }
  return buckets;
}

}  // namespace

PassOptions OptionsOf(const Schedule& schedule) {
  PassOptions options;
  const auto add = [&](const char* name, std::string value) {
    if (!value.empty()) options.Set(name, std::move(value));
  };
  add("keep", UnitNames(schedule.keep));
  add("forward", PrintBuckets(schedule.forward));
  add("backward", PrintBuckets(schedule.backward));
  add("reduce", PrintBuckets(schedule.reduce));
  return options;
}

std::string PrintSchedule(const Schedule& schedule) {
  return PrintPass(MakeCall("schedule", OptionsOf(schedule)));
}

Result<Schedule> ReadSchedule(const Program& program, const PassOptions& options) {
  Schedule schedule;
  const std::string keep = options.Text("keep", "none");
  if (keep == "all") {
    schedule.keep = KeepableUnits(program);
  } else if (keep != "none") {
    INTERLACE_ASSIGN(schedule.keep, ReadUnits(program, keep, "option keep"));
    std::sort(schedule.keep.begin(), schedule.keep.end());
  }
  INTERLACE_ASSIGN(schedule.forward, ReadBuckets(program, options, "forward"));
  INTERLACE_ASSIGN(schedule.backward, ReadBuckets(program, options, "backward"));
  INTERLACE_ASSIGN(schedule.reduce, ReadBuckets(program, options, "reduce"));
  return schedule;
}

Result<Schedule> ScheduleOf(Program& program, const Program& before) {
  Schedule schedule;
  std::vector<UnitId> now = KeepableUnits(program);
  for (UnitId unit : KeepableUnits(before)) {
    if (!std::binary_search(now.begin(), now.end(), unit)) schedule.keep.push_back(unit);
  }
  const std::vector<Phase*> phases = MicroBatches(program);
  if (phases.empty()) return schedule;
  INTERLACE_ASSIGN(Transfers transfers, Transfers::Read(program, *phases[0]));
  for (Part part : {Part::kForward, Part::kBackward}) {
    // Steps of the program before anything was merged: every first use of a full buffer.
    std::set<ValueId> waiting;
    std::vector<int32_t> steps;
    for (const Gather& gather : transfers.gathers) {
      if (gather.part == part) waiting.insert(gather.fulls.begin(), gather.fulls.end());
    }
    for (int32_t i = 0; i < transfers.size(); ++i) {
      const Op& op = transfers.op(i);
      const auto here = [&](ValueId id) { return waiting.contains(id); };
      if (op.kind == OpKind::kGatherWait && AnyOperand(op, here)) steps.push_back(i);
    }
    std::vector<Schedule::Bucket>& buckets = part == Part::kForward ? schedule.forward : schedule.backward;
    for (const Gather& gather : transfers.gathers) {
      if (gather.part != part) continue;
      const auto need = std::lower_bound(steps.begin(), steps.end(), gather.need) - steps.begin();
      const auto at = std::lower_bound(steps.begin(), steps.end(), gather.at) - steps.begin();
      const bool before_all = !steps.empty() && gather.at < steps[0];
      buckets.push_back({gather.units, static_cast<int32_t>(need - at) + (before_all ? 1 : 0)});
    }
  }
  INTERLACE_ASSIGN(const Transfers last, Transfers::Read(program, *phases.back()));
  for (size_t i = 0; i < last.reduces.size(); ++i) {
    const Reduce& reduce = last.reduces[i];
    int32_t late = 0;
    for (size_t j = i + 1; j < last.reduces.size(); ++j) {
      const Reduce& other = last.reduces[j];
      if (std::pair(other.at, other.order) < std::pair(reduce.wait, reduce.wait_order)) ++late;
    }
    // Just before the next start and after it are the same as far as the lanes are concerned: one later at most.
    schedule.reduce.push_back({reduce.units, late + 1});
  }
  return schedule;
}

Status ApplySchedule(Program& program, const Schedule& schedule) {
  Result<bool> kept = KeepGathered(program, schedule.keep);
  if (!kept.ok()) return kept.error();
  for (Phase* phase : MicroBatches(program)) {
    INTERLACE_ASSIGN(Transfers transfers, Transfers::Read(program, *phase));
    PlaceGathers(program, transfers, Part::kForward, schedule.forward);
    PlaceGathers(program, transfers, Part::kBackward, schedule.backward);
    PlaceReduces(program, transfers, schedule.reduce);
    INTERLACE_TRY(transfers.Write());
  }
  return Ok{};
}

Result<bool> SchedulePass(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(Schedule schedule, ReadSchedule(program, options));
  INTERLACE_TRY(ApplySchedule(program, schedule));
  return true;
}

}  // namespace interlace
