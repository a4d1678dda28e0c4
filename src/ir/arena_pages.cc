#include "ir/arena_pages.h"

#include <algorithm>
#include <set>

namespace interlace {
namespace {

constexpr int64_t kMostEvents = 400'000;  // of pages that begin to live, in a step
constexpr int kMostRounds = 8;

class Simulation {
 public:
  Simulation(const std::vector<ArenaBlock>& blocks, const std::vector<int64_t>& offsets,
             const std::vector<PageSlots>& variants, const std::vector<int32_t>& sequence)
      : blocks_(blocks), offsets_(offsets), variants_(variants), sequence_(sequence) {
    int64_t events = 0, end = 0;
    for (size_t b = 0; b < blocks.size(); ++b) {
      end = std::max(end, offsets[b] + blocks[b].bytes);
      events += static_cast<int64_t>(blocks[b].spans.size()) * (blocks[b].bytes / page_ + 2);
    }
    while (events > kMostEvents) page_ *= 2, events /= 2;
    const auto pages = static_cast<size_t>(end / page_ + 1);
    lives_.assign(pages, 0);
    resident_.assign(pages, 0);
    key_.assign(pages, 0);
    uses_.resize(pages);
    for (const PageSlots& v : variants) slots_ = std::max(slots_, v.axis + v.ops + 2);
    begin_.resize(static_cast<size_t>(slots_));
    end_.resize(static_cast<size_t>(slots_));
    returns_.resize(static_cast<size_t>(slots_));
    for (size_t b = 0; b < blocks.size(); ++b) {
      if (blocks[b].bytes == 0) continue;
      for (const LifeSpan& s : blocks[b].spans) {
        begin_[static_cast<size_t>(s.first)].push_back(static_cast<int32_t>(b));
        end_[static_cast<size_t>(s.last)].push_back(static_cast<int32_t>(b));
      }
    }
    for (int32_t t = 0; t < slots_; ++t) {
      for (int32_t b : begin_[static_cast<size_t>(t)]) {
        ForEachPage(b, [&](size_t page) {
          if (uses_[page].empty() || uses_[page].back() != t) uses_[page].push_back(t);
        });
      }
    }
  }

  ArenaPages Run() {
    Cycle();
    Cycle();
    most_ = peak_;  // of what lives
    for (int round = 0; round < kMostRounds; ++round) {
      changed_ = false;
      Cycle();
      Cycle();
      if (!changed_) break;
    }
    ArenaPages out;
    out.page_bytes = page_;
    out.peak_bytes = static_cast<int64_t>(most_) * page_;
    for (size_t v = 0; v < variants_.size(); ++v) {
      if (variants_[v].axis <= peak_at_)
        out.peak_variant = static_cast<int32_t>(v), out.peak_place = std::max(0, peak_at_ - variants_[v].axis - 1);
      for (int32_t t = variants_[v].axis; t < variants_[v].axis + variants_[v].ops + 2; ++t) {
        const std::set<int32_t>& pages = returns_[static_cast<size_t>(t)];
        for (auto it = pages.begin(); it != pages.end();) {
          const int32_t first = *it;
          int32_t next = first;
          while (it != pages.end() && *it == next) ++it, ++next;
          out.returns.push_back(
              {static_cast<int32_t>(v), std::max(0, t - variants_[v].axis - 1), first * page_, (next - first) * page_});
        }
      }
    }
    return out;
  }

 private:
  template <typename F>
  void ForEachPage(int32_t block, F&& f) const {
    const int64_t from = offsets_[static_cast<size_t>(block)], to = from + blocks_[static_cast<size_t>(block)].bytes;
    for (int64_t page = from / page_; page * page_ < to; ++page) f(static_cast<size_t>(page));
  }

  void Cycle() {
    for (int32_t v : sequence_) {
      const PageSlots& slots = variants_[static_cast<size_t>(v)];
      const int32_t last = slots.axis + slots.ops + 1;
      for (int32_t t = slots.axis; t <= last; ++t) {
        ++now_;
        Begin(t);
        if (t == slots.axis && ended_ >= 0) End(ended_);  // what went on has begun again
        if (t != last) End(t);
      }
      ended_ = last;
    }
  }

  void Begin(int32_t t) {
    for (int32_t page : returns_[static_cast<size_t>(t)]) {
      if (lives_[static_cast<size_t>(page)] == 0) Forget(page);
    }
    std::vector<size_t> missing;
    for (int32_t b : begin_[static_cast<size_t>(t)]) {
      ForEachPage(b, [&](size_t page) {
        if (lives_[page]++ > 0) return;
        ++living_;
        if (resident_[page]) {
          idle_.erase({key_[page], static_cast<int32_t>(page)});
        } else {
          missing.push_back(page);
        }
      });
    }
    if (living_ > peak_) peak_ = living_, peak_at_ = t;
    while (most_ > 0 && count_ + missing.size() > most_ && !idle_.empty()) {
      const int32_t page = idle_.rbegin()->second;
      Forget(page);
      returns_[static_cast<size_t>(t)].insert(page);
      changed_ = true;
    }
    for (size_t page : missing) resident_[page] = 1;
    count_ += missing.size();
  }

  void End(int32_t t) {
    for (int32_t b : end_[static_cast<size_t>(t)]) {
      ForEachPage(b, [&](size_t page) {
        if (--lives_[page] > 0) return;
        --living_;
        const std::vector<int32_t>& uses = uses_[page];
        const auto next = std::upper_bound(uses.begin(), uses.end(), t);
        key_[page] = now_ + (next != uses.end() ? *next - t : uses.front() + slots_ - t);
        idle_.insert({key_[page], static_cast<int32_t>(page)});
      });
    }
  }

  void Forget(int32_t page) {
    if (!resident_[static_cast<size_t>(page)]) return;
    idle_.erase({key_[static_cast<size_t>(page)], page});
    resident_[static_cast<size_t>(page)] = 0;
    --count_;
  }

  const std::vector<ArenaBlock>& blocks_;
  const std::vector<int64_t>& offsets_;
  const std::vector<PageSlots>& variants_;
  const std::vector<int32_t>& sequence_;
  int64_t page_ = kArenaPage;
  int32_t slots_ = 0;
  std::vector<std::vector<int32_t>> begin_, end_;  // by slot: blocks
  std::vector<std::set<int32_t>> returns_;         // by slot: pages
  std::vector<std::vector<int32_t>> uses_;         // by page: slots where a block on it begins to live
  std::vector<int32_t> lives_;                     // by page: blocks on it that live
  std::vector<char> resident_;
  std::vector<int64_t> key_;                             // by page that idles: when it is used again
  std::set<std::pair<int64_t, int32_t>> idle_;           // of resident pages
  size_t living_ = 0, peak_ = 0, count_ = 0, most_ = 0;  // pages; most_ 0: as many as there are
  int32_t peak_at_ = 0;
  int64_t now_ = 0;
  int32_t ended_ = -1;  // the end of the variant before, whose blocks may go on
  bool changed_ = false;
};

}  // namespace

ArenaPages PlanPages(const std::vector<ArenaBlock>& blocks, const std::vector<int64_t>& offsets,
                     const std::vector<PageSlots>& variants, const std::vector<int32_t>& sequence) {
  return Simulation(blocks, offsets, variants, sequence).Run();
}

}  // namespace interlace
