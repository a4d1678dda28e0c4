#include "passes/search_space.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <set>

#include "base/scan.h"
#include "ir/op_table.h"
#include "passes/keep.h"
#include "passes/recompute_choice.h"
#include "passes/transfers.h"

namespace interlace {
namespace {

constexpr int64_t kByBlock = -1;  // a bucket is a block of the model
constexpr std::array<int64_t, 8> kBucketBytes = {0, kByBlock, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30};
constexpr std::array<int32_t, 9> kAhead = {0, 1, 2, 3, 5, 8, 16, 32, Schedule::kAtOnce};
constexpr std::array<int32_t, 6> kLate = {0, 1, 2, 4, 8, Schedule::kAtOnce};
constexpr int32_t kShares = 8;

// The index of a unit's bucket, or the list's size.
size_t Find(const std::vector<Schedule::Bucket>& buckets, UnitId unit) {
  for (size_t i = 0; i < buckets.size(); ++i) {
    if (std::find(buckets[i].units.begin(), buckets[i].units.end(), unit) != buckets[i].units.end()) return i;
  }
  return buckets.size();
}

void Join(std::vector<Schedule::Bucket>& buckets, size_t first) {
  Schedule::Bucket& into = buckets[first];
  const Schedule::Bucket& from = buckets[first + 1];
  into.units.insert(into.units.end(), from.units.begin(), from.units.end());
  buckets.erase(buckets.begin() + static_cast<ptrdiff_t>(first) + 1);
}

void SplitInTwo(std::vector<Schedule::Bucket>& buckets, size_t at) {
  Schedule::Bucket second = buckets[at];
  const auto half = static_cast<ptrdiff_t>(second.units.size() / 2);
  second.units.erase(second.units.begin(), second.units.begin() + half);
  buckets[at].units.resize(static_cast<size_t>(half));
  buckets.insert(buckets.begin() + static_cast<ptrdiff_t>(at) + 1, std::move(second));
}

void Later(int32_t& ahead, int32_t by) {
  ahead = ahead >= Schedule::kAtOnce ? ahead : ahead + by;
}

using Recompute = CapturedDecisions::Recompute;

// The first `count` blocks.
CapturedDecisions RecomputationOf(const std::vector<std::string>& blocks, size_t count) {
  const auto end = blocks.begin() + static_cast<ptrdiff_t>(count);
  return {Recompute::kBlocks, std::vector<std::string>(blocks.begin(), end), blocks.size(), 1};
}

}  // namespace

std::vector<std::string> BlocksOf(const Program& program) {
  std::vector<std::string> blocks;
  std::set<std::string> seen;
  for (const Param& param : program.params) {
    std::string block = BlockOf(param.name);
    if (!block.empty() && seen.insert(block).second) blocks.push_back(std::move(block));
  }
  return blocks;
}

Result<SearchSpace> SearchSpace::Of(const Program& base) {
  SearchSpace space;
  Program program = base.Clone();
  const std::vector<Phase*> phases = MicroBatches(program);
  if (phases.empty()) return MakeError("the program has no micro-batch phase");
  INTERLACE_ASSIGN(Transfers transfers, Transfers::Read(program, *phases[0]));
  space.bytes_.assign(program.units.size(), 0);
  std::vector<std::string> block_of(program.units.size());
  for (const Param& param : program.params) {
    if (param.unit != kNone) block_of[param.unit] = BlockOf(param.name);
  }
  for (const std::string& block : BlocksOf(program)) space.blocks_ += (space.blocks_.empty() ? "" : "+") + block;
  std::vector<int32_t> last_forward(program.units.size(), -1), first_backward(program.units.size(), -1);
  for (const Gather& gather : transfers.gathers) {
    std::vector<Item>& items = gather.part == Part::kBackward ? space.backward_ : space.forward_;
    for (size_t i = 0; i < gather.units.size(); ++i) {
      const UnitId unit = gather.units[i];
      INTERLACE_ASSIGN(const int64_t bytes, program.StorageBytes(program.value(gather.fulls[i]).type));
      items.push_back({unit, bytes, block_of[unit]});
      space.bytes_[unit] = bytes;
      (gather.part == Part::kBackward ? first_backward : last_forward)[unit] = gather.need;
    }
  }
  // Every micro-batch that reduces does it alike; the last one always does (reduce_last).
  INTERLACE_ASSIGN(const Transfers last, Transfers::Read(program, *phases.back()));
  for (const Reduce& reduce : last.reduces) {
    for (size_t i = 0; i < reduce.units.size(); ++i) {
      const UnitId unit = reduce.units[i];
      INTERLACE_ASSIGN(const int64_t bytes, program.StorageBytes(program.value(reduce.flats[i]).type));
      space.reduce_.push_back({unit, bytes, block_of[unit]});
    }
  }
  space.by_size_ = space.by_distance_ = KeepableUnits(program);
  std::stable_sort(space.by_size_.begin(), space.by_size_.end(),
                   [&](UnitId a, UnitId b) { return space.bytes_[a] < space.bytes_[b]; });
  std::stable_sort(space.by_distance_.begin(), space.by_distance_.end(), [&](UnitId a, UnitId b) {
    return first_backward[a] - last_forward[a] < first_backward[b] - last_forward[b];
  });
  return space;
}

std::vector<UnitId> SearchSpace::KeptUnits(const Settings& settings) const {
  const std::vector<UnitId>& order = settings.keep_order == 0 ? by_size_ : by_distance_;
  int64_t total = 0;
  for (UnitId unit : order) total += bytes_[unit];
  std::vector<UnitId> kept;
  int64_t left = total / kShares * settings.keep + (settings.keep == kShares ? kShares : 0);
  for (UnitId unit : order) {
    if (bytes_[unit] > left) break;
    left -= bytes_[unit];
    kept.push_back(unit);
  }
  std::sort(kept.begin(), kept.end());
  return kept;
}

std::vector<Schedule::Bucket> SearchSpace::Buckets(const std::vector<Item>& items, int32_t size, int32_t ahead,
                                                   const std::vector<char>& left_out) const {
  std::vector<Schedule::Bucket> buckets;
  const int64_t most = kBucketBytes[size];
  int64_t bytes = 0;
  const std::string* block = nullptr;
  for (const Item& item : items) {
    if (left_out[item.unit]) continue;
    const bool joins =
        most == kByBlock ? block != nullptr && !block->empty() && *block == item.block : bytes + item.bytes <= most;
    if (buckets.empty() || !joins) {
      buckets.push_back({{}, ahead});
      bytes = 0;
    }
    buckets.back().units.push_back(item.unit);
    bytes += item.bytes;
    block = &item.block;
  }
  return buckets;
}

Schedule SearchSpace::Make(const Settings& s) const {
  Schedule schedule;
  schedule.keep = KeptUnits(s);
  std::vector<char> none(bytes_.size(), 0), kept(bytes_.size(), 0);
  for (UnitId unit : schedule.keep) kept[unit] = 1;
  schedule.forward = Buckets(forward_, s.forward_bucket, kAhead[s.forward_ahead], none);
  // What is kept is gathered in the part that needs it first.
  std::vector<char> gone = kept;
  std::set<UnitId> in_forward;
  for (const Item& item : forward_) in_forward.insert(item.unit);
  for (UnitId unit : schedule.keep) gone[unit] = in_forward.count(unit) > 0;
  schedule.backward = Buckets(backward_, s.backward_bucket, kAhead[s.backward_ahead], gone);
  schedule.reduce = Buckets(reduce_, s.reduce_bucket, kLate[s.late], none);
  return schedule;
}

SearchSpace::Settings SearchSpace::AllKept() const {
  Settings settings;
  settings.keep = kShares;
  return settings;
}

std::vector<SearchSpace::Settings> SearchSpace::Starts() const {
  std::vector<Settings> starts;
  const auto index_of = [](const auto& ladder, int32_t value) {
    return static_cast<int32_t>(std::find(ladder.begin(), ladder.end(), value) - ladder.begin());
  };
  for (int32_t keep : {0, kShares}) {
    for (int32_t bucket : {0, 1}) {  // alone, by block
      for (int32_t ahead : {1, 3, Schedule::kAtOnce}) {
        for (int32_t late : {1, 4}) {
          if (ahead == 1 && late == 4) continue;
          Settings s;
          s.forward_bucket = s.backward_bucket = s.reduce_bucket = bucket;
          s.forward_ahead = index_of(kAhead, ahead);
          s.backward_ahead = index_of(kAhead, std::min(ahead, 3));
          s.late = index_of(kLate, late);
          s.keep = keep;
          starts.push_back(s);
        }
      }
    }
  }
  return starts;
}

std::vector<SearchSpace::Settings> SearchSpace::Neighbours(const Settings& settings) const {
  std::vector<Settings> out;
  auto step = [&](int32_t Settings::*field, size_t count) {
    for (int32_t by : {1, -1}) {
      Settings next = settings;
      next.*field += by;
      if (next.*field >= 0 && next.*field < static_cast<int32_t>(count)) out.push_back(next);
    }
  };
  step(&Settings::backward_ahead, kAhead.size());
  step(&Settings::forward_ahead, kAhead.size());
  step(&Settings::late, kLate.size());
  step(&Settings::reduce_bucket, kBucketBytes.size());
  step(&Settings::backward_bucket, kBucketBytes.size());
  step(&Settings::forward_bucket, kBucketBytes.size());
  step(&Settings::keep, kShares + 1);
  if (settings.keep > 0 && settings.keep < kShares) step(&Settings::keep_order, 2);
  return out;
}

void SearchSpace::Move(const Schedule& from, const Stall& stall, std::vector<Schedule>& moves) const {
  using Buckets = std::vector<Schedule::Bucket>;
  Buckets Schedule::*const list = stall.reduce                    ? &Schedule::reduce
                                  : stall.part == Part::kBackward ? &Schedule::backward
                                                                  : &Schedule::forward;
  const Buckets& buckets = from.*list;
  const size_t at = Find(buckets, stall.unit);
  if (at == buckets.size()) return;
  const auto add = [&](auto&& change) {
    Schedule next = from;
    change(next.*list);
    moves.push_back(std::move(next));
  };
  for (int32_t by : {1, stall.reduce ? 3 : 2}) {
    add([&](Buckets& b) { Later(b[at].ahead, by); });
  }
  add([&](Buckets& b) {  // this and all that come after it
    for (size_t i = at; i < b.size(); ++i) Later(b[i].ahead, 1);
  });
  if (!stall.reduce && from.keep != by_size_) moves.push_back(KeepAlso(from, buckets[at].units));
  if (buckets[at].units.size() > 1) add([&](Buckets& b) { SplitInTwo(b, at); });
  if (at > 0) add([&](Buckets& b) { Join(b, at - 1); });
  if (at + 1 < buckets.size()) add([&](Buckets& b) { Join(b, at); });
  if (!stall.reduce) add([&](Buckets& b) { b[at].ahead = Schedule::kAtOnce; });
}

// The units stay gathered: those that the forward part gathers are not gathered for the backward part.
Schedule SearchSpace::KeepAlso(Schedule s, const std::vector<UnitId>& units) const {
  for (UnitId u : units) {
    if (std::find(by_size_.begin(), by_size_.end(), u) != by_size_.end()) s.keep.push_back(u);
  }
  std::sort(s.keep.begin(), s.keep.end());
  s.keep.erase(std::unique(s.keep.begin(), s.keep.end()), s.keep.end());
  for (Schedule::Bucket& bucket : s.backward) {
    std::erase_if(bucket.units, [&](UnitId u) {
      return std::binary_search(s.keep.begin(), s.keep.end(), u) && Find(s.forward, u) < s.forward.size();
    });
  }
  std::erase_if(s.backward, [](const Schedule::Bucket& bucket) { return bucket.units.empty(); });
  return s;
}

std::vector<Schedule> SearchSpace::Moves(const Schedule& schedule, const std::vector<Stall>& stalls) const {
  constexpr size_t kStalls = 4;
  std::vector<Schedule> moves;
  for (size_t i = 0; i < std::min(kStalls, stalls.size()); ++i) Move(schedule, stalls[i], moves);
  return moves;
}

void SearchSpace::Regroup(const Schedule& schedule, const std::function<bool(const Schedule&)>& visit) {
  for (auto list : {&Schedule::reduce, &Schedule::backward, &Schedule::forward}) {
    const std::vector<Schedule::Bucket>& from = schedule.*list;
    for (size_t i = 0; i < from.size(); ++i) {
      if (i + 1 < from.size()) {
        Schedule next = schedule;
        Join(next.*list, i);
        if (!visit(next)) return;
      }
      if (from[i].units.size() < 2) continue;
      for (const bool first : {true, false}) {  // of this bucket's units, which leaves
        Schedule next = schedule;
        std::vector<Schedule::Bucket>& buckets = next.*list;
        std::vector<UnitId>& units = buckets[i].units;
        Schedule::Bucket alone = from[i];
        alone.units = {first ? units.front() : units.back()};
        units.erase(first ? units.begin() : units.end() - 1);
        const size_t at = first ? i : i + 1;  // between the two that it joins next
        buckets.insert(buckets.begin() + static_cast<ptrdiff_t>(at), std::move(alone));
        if (!visit(next)) return;
        const bool joins = first ? at > 0 : at + 1 < buckets.size();
        if (!joins) continue;
        if (!first) buckets[at].ahead = buckets[at + 1].ahead;  // its new neighbours'
        Join(buckets, first ? at - 1 : at);
        if (!visit(next)) return;
      }
    }
  }
}

namespace {

// Whether activations travel between ranks. (The norm of a sharded gradient does as well, and is no activation.)
bool Exchanges(const Program& program) {
  return std::any_of(program.params.begin(), program.params.end(), [](const Param& p) { return !p.cuts.empty(); });
}

// Blocks that can be recomputed: of a stage of a pipeline its own, but for those that a border cuts.
std::vector<std::string> RecomputableBlocks(const Program& captured, const Program& sharded) {
  std::vector<std::string> blocks = BlocksOf(sharded);
  const std::string* borders = sharded.Meta("stages");
  if (borders == nullptr) return blocks;
  for (const std::string_view border : Split(*borders, '+')) {
    const std::string block = BlockOf(border);
    const auto first = std::find_if(captured.params.begin(), captured.params.end(),
                                    [&](const Param& p) { return BlockOf(p.name) == block; });
    if (first != captured.params.end() && !first->name.starts_with(border)) std::erase(blocks, block);
  }
  return blocks;
}

bool DividesMicroBatch(const Program& program, int64_t parts) {
  const std::string* text = program.Meta("micro_batch");
  int64_t samples = 0;
  if (text != nullptr) std::from_chars(text->data(), text->data() + text->size(), samples);
  return samples >= parts && samples % parts == 0;
}

}  // namespace

std::vector<CapturedDecisions> CapturedSpace(const Program& captured, const Program& sharded, bool recompute,
                                             bool breadth_first, bool accumulate) {
  std::vector<CapturedDecisions> all = {{}};
  const bool stage = sharded.stage.has_value();
  const std::vector<std::string> blocks = RecomputableBlocks(captured, sharded);
  if (recompute && !blocks.empty() && captured.Meta("recompute") == nullptr) {
    all.push_back({Recompute::kSelective, stage ? blocks : std::vector<std::string>(), 0, 1});
    std::set<size_t> counts;
    for (size_t quarter : {1, 2, 3, 4}) counts.insert(std::max<size_t>(blocks.size() * quarter / 4, 1));
    for (size_t count : counts) all.push_back(RecomputationOf(blocks, count));
  }
  const size_t recomputations = all.size();
  if (breadth_first && Exchanges(sharded) && DividesMicroBatch(captured, 2)) {
    for (size_t i = 0; i < recomputations; ++i) {
      all.push_back(all[i]);
      all.back().parts = 2;
    }
  }
  if (recompute && Exchanges(sharded) && !stage) {
    const size_t count = all.size();
    for (size_t i = 0; i < count; ++i) {
      if (all[i].recompute == Recompute::kBlocks) continue;
      all.push_back(all[i]);
      all.back().regather = true;
    }
  }
  size_t first_last = 0;  // of those that reduce once a step
  if (sharded.accumulate_mode != "reduce_last") {
    if (!accumulate || sharded.accumulation == 1) return all;
    first_last = all.size();
    for (size_t i = 0; i < first_last; ++i) {
      all.push_back(all[i]);
      all.back().reduce_last = true;
    }
  }
  if (!breadth_first || sharded.width != 1) return all;
  for (int64_t width : {2, 4}) {
    if (sharded.accumulation % width != 0) continue;
    std::vector<size_t> with = {0};
    if (width == 2 && recomputations > 1) with = {0, 1, recomputations - 1};
    for (size_t i : with) {
      all.push_back(all[first_last + i]);
      all.back().width = width;
    }
  }
  return all;
}

std::vector<CapturedDecisions> NeighboursOf(const Program& captured, const Program& sharded,
                                            const CapturedDecisions& chosen,
                                            const std::vector<CapturedDecisions>& all) {
  std::vector<CapturedDecisions> out;
  if (chosen.recompute == Recompute::kSelective || chosen.width > 1) return out;
  const std::vector<std::string> blocks = RecomputableBlocks(captured, sharded);
  const size_t step = std::max<size_t>(blocks.size() / 8, 1), count = chosen.blocks.size();
  for (size_t next : {count >= step ? count - step : 0, count + step}) {
    if (next == 0 || next > blocks.size()) continue;
    CapturedDecisions variant = RecomputationOf(blocks, next);
    variant.reduce_last = chosen.reduce_last;
    if (std::find(all.begin(), all.end(), variant) == all.end()) out.push_back(std::move(variant));
  }
  return out;
}

}  // namespace interlace
