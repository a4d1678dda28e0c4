#include "passes/stages/balance.h"

#include <algorithm>
#include <limits>

#include "base/scan.h"
#include "base/suggest.h"
#include "passes/stages/recut.h"
#include "passes/step_line.h"

namespace interlace::stages {
namespace {

// Whether `name` is the parameter, or a module that it belongs to.
bool Names(std::string_view name, std::string_view param) {
  return param.starts_with(name) && (param.size() == name.size() || param[name.size()] == '.');
}

// Times of all stages that begin at one border and end at another, from sums over ops. What a border's messages take
// beyond those of the lightest is the time of both its stages: what all borders send alike is left to the schedule.
class StageTimes {
 public:
  explicit StageTimes(const Flow& flow) : flow_(flow), levels_(static_cast<size_t>(flow.size()), 0), sums_(2, 0) {}

  // One more border; `above`: what belongs above it.
  void Add(const std::vector<char>& above) {
    for (size_t i = 0; i < above.size(); ++i) levels_[i] += above[i];
    sums_.push_back(0);
  }

  Status Measure(CostModel& model, const std::string& axis, const std::vector<Border>& all) {
    for (int32_t i = 0; i < flow_.size(); ++i) {
      if (flow_.Repeats(i) || TakesNoTime(flow_.op(i))) continue;
      INTERLACE_ASSIGN(const OpCost cost, model.Cost(flow_.op(i)));
      sums_[static_cast<size_t>(levels_[i]) + 1] += TimeOf(cost);
    }
    for (size_t k = 1; k < sums_.size(); ++k) sums_[k] += sums_[k - 1];
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const Border& border : all) {
      int64_t time = 0;
      for (const double bytes : {border.bytes, border.back}) {
        INTERLACE_ASSIGN(const OpCost cost, model.CollectiveCost(Exchange::kPointToPoint, axis, bytes, /*units=*/1));
        time += TimeOf(cost);
      }
      messages_.push_back(time);
      least = std::min(least, time);
    }
    for (int64_t& time : messages_) time -= least;
    return Ok{};
  }

  // Of the ops that are above `from` borders at least and fewer than `to`, and of messages at these two borders.
  int64_t Between(size_t from, size_t to) const {
    return sums_[to] - sums_[from] + (from == 0 ? 0 : messages_[from - 1]) +
           (to > messages_.size() ? 0 : messages_[to - 1]);
  }
  // Of the ops that are above fewer borders than `to`.
  int64_t Until(size_t to) const { return sums_[to]; }

 private:
  const Flow& flow_;
  std::vector<int32_t> levels_;  // by op: the number of borders that it is above
  std::vector<int64_t> sums_;
  std::vector<int64_t> messages_;  // by border
};

double BytesAt(const Border& border) {
  return border.bytes + border.back;
}

// choice[k][b]: the border in front of stage k when stage k ends at border b (the count of borders: at the end).
// Minimizes the slowest stage or, with a limit for it, what crosses, as shares of the heaviest border, and the squares
// of the stages' shares of the limit: of stages that are no slower these that leave little for one of them are worse.
std::vector<size_t> Best(const std::vector<Border>& all, const StageTimes& times, size_t stages, int64_t limit) {
  const size_t count = all.size();
  const double never = std::numeric_limits<double>::infinity();
  double heaviest = 1;
  for (const Border& border : all) heaviest = std::max(heaviest, BytesAt(border));
  const auto squared = [&](int64_t time) {
    const double share = static_cast<double>(time) / static_cast<double>(std::max<int64_t>(limit, 1));
    return share * share;
  };
  std::vector<double> best(count + 1, never);
  std::vector<std::vector<size_t>> choice(stages, std::vector<size_t>(count + 1, 0));
  for (size_t b = 0; b <= count; ++b) {
    // Stage 0 begins at no border and ends at border b, so its ops are above at most b borders.
    const int64_t time = times.Between(0, b + 1);
    best[b] = limit == 0 ? static_cast<double>(time) : time <= limit ? squared(time) : never;
  }
  for (size_t k = 1; k < stages; ++k) {
    std::vector<double> next(count + 1, never);
    for (size_t b = k; b <= count; ++b) {
      for (size_t a = k - 1; a < b; ++a) {
        if (best[a] == never) continue;
        const int64_t time = times.Between(a + 1, b + 1);
        const double cost = limit == 0      ? std::max(best[a], static_cast<double>(time))
                            : time <= limit ? best[a] + BytesAt(all[a]) / heaviest + squared(time)
                                            : never;
        if (cost < next[b]) next[b] = cost, choice[k][b] = a;
      }
    }
    best = std::move(next);
  }
  std::vector<size_t> borders(stages);
  for (size_t k = stages, b = count; k-- > 1;) borders[k] = b = choice[k][b];
  borders.erase(borders.begin());
  return borders;
}

// Borders of stages dealt as a V, whose slowest rank takes as little as can be. From outside in: when the outer ranks
// have what is in front of one cut and behind another, these that leave the least between them for the rest are best.
class Bent {
 public:
  // `straight`: balanced stages, from which it begins. No border sends more bytes than theirs, no stage takes much
  // more.
  Bent(const std::vector<Border>& all, const StageTimes& times, const std::vector<size_t>& straight) : times_(times) {
    double bytes = 0;
    for (size_t border : straight) bytes = std::max(bytes, BytesAt(all[border]));
    for (size_t border = 0; border < all.size(); ++border) {
      if (BytesAt(all[border]) > bytes) continue;
      borders_.push_back(border);
      until_.push_back(times.Until(border + 1));
    }
    borders_.push_back(all.size());
    until_.push_back(times.Until(all.size() + 1));
    ranks_ = (straight.size() + 1) / 2;
    cuts_ = {0};
    for (size_t border : straight) {
      const auto at = std::lower_bound(borders_.begin(), borders_.end(), border);
      cuts_.push_back(static_cast<size_t>(at - borders_.begin()) + 1);
    }
    cuts_.push_back(end());
    for (size_t stage = 0; stage + 1 < cuts_.size(); ++stage)
      stage_ = std::max(stage_, Time(cuts_[stage], cuts_[stage + 1]) / 4 * 5);
  }

  std::vector<size_t> Best() {
    int64_t most = 0;
    for (size_t rank = 0; rank < ranks_; ++rank)
      most = std::max(
          most, Time(cuts_[rank], cuts_[rank + 1]) + Time(cuts_[2 * ranks_ - 1 - rank], cuts_[2 * ranks_ - rank]));
    for (int64_t least = until_.back() / static_cast<int64_t>(ranks_); most - least > most / 500;) {
      const int64_t middle = least + (most - least) / 2;
      (Cut(middle) ? most : least) = middle;
    }
    std::vector<size_t> out;
    for (size_t k = 1; k + 1 < cuts_.size(); ++k) out.push_back(borders_[cuts_[k] - 1]);
    return out;
  }

 private:
  // Cuts: 0 in front of everything, k behind the k-th border, and the end.
  size_t end() const { return borders_.size(); }
  int64_t Time(size_t from, size_t to) const {
    return times_.Between(from == 0 ? 0 : borders_[from - 1] + 1, borders_[to - 1] + 1);
  }
  // The first cut of a stage that ends at `to` and takes so much at most; `to`: there is none.
  size_t First(size_t to, int64_t most) const {
    most = std::min(most, stage_);
    const auto at = std::lower_bound(until_.begin(), until_.begin() + static_cast<ptrdiff_t>(to) - 1,
                                     until_[to - 1] - most);  // without messages
    auto first = static_cast<size_t>(at - until_.begin()) + 1;
    while (first < to && Time(first, to) > most) ++first;
    return first;
  }

  // Whether there are cuts with which no rank takes more than `most`; they are kept.
  bool Cut(int64_t most) {
    const size_t none = end() + 1;
    std::vector<std::vector<size_t>> reach(ranks_, std::vector<size_t>(end(), none)), from = reach;
    reach[0][0] = end();
    for (size_t rank = 0; rank + 1 < ranks_; ++rank) {
      for (size_t a = 0; a < end(); ++a) {
        const size_t b = reach[rank][a];
        const int64_t limit = std::min(most, stage_), before = a == 0 ? 0 : until_[a - 1];
        for (size_t next = a + 1; b != none && next < b && until_[next - 1] - before <= limit; ++next) {
          if (Time(a, next) > limit) continue;
          const size_t other = std::max(First(b, most - Time(a, next)), next + 1);
          if (other < b && other < reach[rank + 1][next]) reach[rank + 1][next] = other, from[rank + 1][next] = a;
        }
      }
    }
    for (size_t a = 0; a < end(); ++a) {
      const size_t b = reach[ranks_ - 1][a];
      if (b == none || b < a + 2 || Time(a, b) > most) continue;
      size_t middle = a + 1;
      while (middle + 1 < b && Time(a, middle) < Time(a, b) / 2) ++middle;
      if (std::max(Time(a, middle), Time(middle, b)) > stage_) continue;
      cuts_[ranks_] = middle;
      for (size_t rank = ranks_ - 1, at = a;; at = from[rank--][at]) {
        cuts_[rank] = at, cuts_[2 * ranks_ - rank] = reach[rank][at];
        if (rank == 0) return true;
      }
    }
    return false;
  }

  const StageTimes& times_;
  std::vector<size_t> borders_;  // that may be taken, and the end
  std::vector<int64_t> until_;   // time of what is in front of each
  std::vector<size_t> cuts_;
  size_t ranks_ = 0;
  int64_t stage_ = 0;  // the most that one may take
};

}  // namespace

std::vector<Border> BordersOf(const Program& program, const Flow& flow, bool frozen) {
  std::vector<int32_t> first(static_cast<size_t>(program.num_values()), -1);  // by parameter: its first use
  for (int32_t i = 0; i < flow.first_backward(); ++i) {
    for (ValueId need : flow.Needs(i)) {
      const int32_t position = flow.PositionOf(i);
      if (first[need] < 0 || position < first[need]) first[need] = position;
    }
  }
  std::vector<std::pair<int32_t, const Param*>> uses;
  for (const Param& param : program.params) {
    if ((param.trainable || frozen) && first[param.value] >= 0) uses.emplace_back(first[param.value], &param);
  }
  std::stable_sort(uses.begin(), uses.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Border> out;
  for (size_t k = 1; k < uses.size(); ++k) {
    const int32_t after = uses[k - 1].first, until = uses[k].first;
    if (after == until) continue;
    Border border{uses[k].second->name, after + 1, flow.Crossing()[static_cast<size_t>(after) + 1]};
    for (int32_t p = after + 2; p <= until; ++p) {
      const double bytes = flow.Crossing()[static_cast<size_t>(p)];
      if (bytes < border.bytes) border.position = p, border.bytes = bytes;
    }
    out.push_back(std::move(border));
  }
  return out;
}

Result<std::vector<Border>> NamedBorders(const std::vector<Border>& all, const std::vector<std::string>& names) {
  std::vector<Border> out;
  for (const std::string& name : names) {
    const auto found =
        std::find_if(all.begin(), all.end(), [&](const Border& border) { return Names(name, border.param); });
    if (found == all.end()) {
      std::vector<std::string_view> known;
      for (const Border& border : all) known.push_back(border.param);
      return MakeError("'", name, "' is no parameter or module that a stage can begin with", DidYouMean(name, known),
                       known.empty() ? "" : "; the first that can is '" + std::string(known[0]) + "'");
    }
    if (!out.empty() && found->position <= out.back().position) {
      return MakeError("'", name, "' is not used behind '", out.back().param,
                       "': write the borders of stages in the order of the forward part");
    }
    out.push_back(*found);
  }
  return out;
}

Result<std::vector<Border>> BalancedBorders(const std::vector<Border>& offered, const Flow& flow, CostModel& model,
                                            const std::string& axis, const Deal& deal) {
  const int64_t stages = deal.Stages();
  if (stages < 2) return std::vector<Border>();
  StageTimes times(flow);
  std::vector<Border> all;
  for (const Border& border : offered) {
    const std::vector<char> above = flow.Above(border.position);
    if (!flow.Fits(above)) continue;
    times.Add(above);
    all.push_back(border);
    all.back().back = flow.Back(above);
  }
  if (static_cast<int64_t>(all.size()) < stages - 1) {
    return MakeError("the model cannot be cut into ", stages, " stages: parameters are used at ", all.size() + 1,
                     " places only",
                     all.size() < offered.size() ? ", but for those where a buffer that the model changes, or what is "
                                                   "recomputed, would be cut in two"
                                                 : "",
                     "; ask for ", all.size() + 1, " stages at most");
  }
  INTERLACE_TRY(times.Measure(model, axis, all));
  const auto count = static_cast<size_t>(stages);
  const std::vector<size_t> fastest = Best(all, times, count, 0);
  int64_t slowest = 1;
  size_t from = 0;
  for (size_t k = 0; k <= fastest.size(); ++k) {
    const size_t to = k < fastest.size() ? fastest[k] + 1 : all.size() + 1;
    slowest = std::max(slowest, times.Between(from, to));
    from = to;
  }
  std::vector<size_t> chosen = Best(all, times, count, slowest + slowest / 50);
  if (deal.v && deal.chunks == 2) chosen = Bent(all, times, chosen).Best();
  std::vector<Border> out;
  for (size_t border : chosen) out.push_back(all[border]);
  return out;
}

Result<std::vector<Border>> ChosenBorders(const Program& program, const Flow& flow, std::string at, const Deal& deal,
                                          CostModel& model, const std::string& axis) {
  const std::vector<Border> all = BordersOf(program, flow, false);
  if (at == "auto") return BalancedBorders(all, flow, model, axis, deal);
  if (at == "model") {
    const std::string* text = program.Meta("stages");
    if (text == nullptr)
      return MakeError("the program has no meta line \"stages\" that says where to cut; write at=auto");
    at = *text;
  }
  std::vector<std::string> names;
  for (std::string_view name : Split(at, '+')) names.emplace_back(name);
  if (at.empty()) names.clear();
  if (static_cast<int64_t>(names.size()) != deal.Stages() - 1) {
    return MakeError(names.size(), names.size() == 1 ? " border makes " : " borders make ", names.size() + 1,
                     " stages, and ", deal.ranks, " ranks with ", deal.chunks, deal.chunks == 1 ? " stage" : " stages",
                     " each need ", deal.Stages() - 1);
  }
  Result<std::vector<Border>> found = NamedBorders(all, names);
  if (!found.ok()) {  // a parameter that has been frozen since
    Result<std::vector<Border>> frozen = NamedBorders(BordersOf(program, flow, true), names);
    if (frozen.ok()) found = std::move(frozen);
  }
  INTERLACE_ASSIGN(std::vector<Border> named, std::move(found));
  for (Border& border : named) border.back = flow.Back(flow.Above(border.position));
  return named;
}

namespace {

// Where an op's results are used first: by op, the stage that is noted of what reads them, -1 if nobody does.
std::vector<int32_t> NotedUses(const Flow& flow) {
  std::vector<int32_t> use(static_cast<size_t>(flow.size()), -1);
  for (int32_t i = flow.size() - 1; i >= 0; --i) {
    if (const Arg* noted = flow.op(i).Attr(kStage)) {
      use[i] = static_cast<int32_t>(noted->integer.value);
      continue;
    }
    const bool backward = i >= flow.first_backward();
    for (ValueId id : flow.op(i).results) {
      const ValueId root = id == kNone ? kNone : flow.NeedOf(id);
      if (root == kNone) continue;
      for (const int32_t reader : flow.Readers(root)) {
        if (reader <= i || use[reader] < 0) continue;
        const bool sooner = backward ? use[reader] > use[i] : use[reader] < use[i];
        if (use[i] < 0 || sooner) use[i] = use[reader];
      }
    }
  }
  return use;
}

// As pass `borders` has noted. What was added since, and has no note, stands where what it reads is made; but what is
// made of parameters and of copies that cross stands where it is used, for nothing else crosses.
std::vector<int32_t> NotedStages(const Flow& flow) {
  const std::vector<int32_t> use = NotedUses(flow);
  std::vector<int32_t> stage(static_cast<size_t>(flow.size()), -1);
  std::vector<char> crosses(static_cast<size_t>(flow.size()), 0);
  for (int32_t i = 0; i < flow.size(); ++i) {
    if (flow.Repeats(i)) continue;
    const Op& op = flow.op(i);
    if (const Arg* noted = op.Attr(kStage)) {
      stage[i] = static_cast<int32_t>(noted->integer.value);
      crosses[i] = op.kind == OpKind::kCopy && op.Attr(kMark) != nullptr ? 1 : 0;
      continue;
    }
    bool of_copies = false, of_others = false;
    for (ValueId root : flow.Needs(i)) {
      const int32_t from = flow.DefOf(root);
      if (from < 0 || from >= i || flow.Repeats(from)) continue;
      stage[i] = std::max(stage[i], stage[from]);
      (crosses[from] != 0 ? of_copies : of_others) = true;
    }
    if (!of_others && use[i] >= 0) stage[i] = use[i], crosses[i] = of_copies ? 1 : 0;
    stage[i] = std::max(stage[i], 0);
  }
  return stage;
}

}  // namespace

std::vector<int32_t> StagesOf(const Flow& flow, const std::vector<Border>& borders) {
  for (int32_t i = 0; i < flow.size(); ++i) {
    if (flow.op(i).Attr(kStage) != nullptr) return NotedStages(flow);
  }
  std::vector<int32_t> stage(static_cast<size_t>(flow.size()), 0);
  for (const Border& border : borders) {
    const std::vector<char> above = flow.Above(border.position);
    for (size_t i = 0; i < above.size(); ++i) stage[i] += above[i];
  }
  for (int32_t i = 0; i < flow.size(); ++i) {
    if (flow.Repeats(i)) {
      stage[i] = -1;
      continue;
    }
    // A backward op stands at or below the stages of what it reads.
    if (i < flow.first_backward() || flow.op(i).kind == OpKind::kGrad) continue;
    for (ValueId root : flow.Needs(i)) {
      if (const int32_t from = flow.DefOf(root); from >= flow.first_backward())
        stage[i] = std::min(stage[i], stage[from]);
    }
  }
  return stage;
}

}  // namespace interlace::stages
