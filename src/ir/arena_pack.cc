#include "ir/arena_pack.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>

namespace interlace {
namespace {

bool Meet(const ArenaBlock& a, const ArenaBlock& b) {
  auto x = a.spans.begin(), y = b.spans.begin();
  while (x != a.spans.end() && y != b.spans.end()) {
    if (x->last < y->first) {
      ++x;
    } else if (y->last < x->first) {
      ++y;
    } else {
      return true;
    }
  }
  return false;
}

int32_t First(const ArenaBlock& b) {
  return b.spans.front().first;
}
int32_t Last(const ArenaBlock& b) {
  return b.spans.back().last;
}

// Blocks that were placed, found again by time. The axis is cut into slices; a block is listed, in order of offset, in
// every slice that it touches. A block within one slice looks at that list alone; a longer one collects from all that
// it touches.
class Placed {
 public:
  explicit Placed(const std::vector<ArenaBlock>& blocks) : blocks_(blocks), seen_(blocks.size(), -1) {
    int32_t end = 0;
    for (const ArenaBlock& b : blocks) end = std::max(end, Last(b) + 1);
    width_ = std::max<int32_t>(16, end / 64);
    slices_.resize(static_cast<size_t>(end / width_) + 1);
  }

  // The lowest free offset for block `id`; it is listed there. `work` counts the neighbours looked at.
  int64_t Place(int32_t id, int64_t& work) {
    const ArenaBlock& block = blocks_[id];
    const int32_t from = First(block) / width_, to = Last(block) / width_;
    int64_t at = 0;
    const auto fits = [&](const Item& item) {
      ++work;
      if (item.last < First(block) || Last(block) < item.first || item.end <= at) return false;
      if ((item.holes || block.spans.size() > 1) && !Meet(block, blocks_[item.id])) return false;
      if (item.begin - at >= block.bytes) return true;
      at = item.end;
      return false;
    };
    if (from == to) {
      for (const Item& item : slices_[from]) {
        if (fits(item)) break;
      }
    } else {
      near_.clear();
      for (int32_t s = from; s <= to; ++s) {
        for (const Item& item : slices_[s]) {
          ++work;
          if (seen_[item.id] == id) continue;
          seen_[item.id] = id;
          if (item.last >= First(block) && Last(block) >= item.first) near_.push_back(item);
        }
      }
      work += static_cast<int64_t>(near_.size()) * 8;
      std::sort(near_.begin(), near_.end(), Lower);
      for (const Item& item : near_) {
        if (fits(item)) break;
      }
    }
    const Item item{at, at + block.bytes, First(block), Last(block), id, block.spans.size() > 1};
    for (int32_t s = from; s <= to; ++s) {
      slices_[s].insert(std::upper_bound(slices_[s].begin(), slices_[s].end(), item, Lower), item);
    }
    return at;
  }

 private:
  struct Item {
    int64_t begin, end;
    int32_t first, last, id;
    bool holes;
  };
  static bool Lower(const Item& a, const Item& b) { return a.begin != b.begin ? a.begin < b.begin : a.id < b.id; }

  const std::vector<ArenaBlock>& blocks_;
  std::vector<int32_t> seen_;
  int32_t width_ = 1;
  std::vector<std::vector<Item>> slices_;
  std::vector<Item> near_;
};

using Order = std::vector<int32_t>;

// Places in this order. Gives up at the first block that ends at or above `limit`, where another order has already got
// to, and returns it; kNobody when all ended below.
constexpr int32_t kNobody = -1;
int32_t PlaceAll(const std::vector<ArenaBlock>& blocks, const Order& order, int64_t limit,
                 std::vector<int64_t>& offsets, int64_t& work) {
  Placed placed(blocks);
  for (int32_t id : order) {
    offsets[id] = placed.Place(id, work);
    if (offsets[id] + blocks[id].bytes >= limit) return id;
  }
  return kNobody;
}

std::vector<Order> Orders(const std::vector<ArenaBlock>& blocks, int32_t live_at) {
  const auto life = [&](int32_t id) { return int64_t{Last(blocks[id])} - First(blocks[id]) + 1; };
  const auto at_peak = [&](int32_t id) { return First(blocks[id]) <= live_at && live_at <= Last(blocks[id]); };
  Order base(blocks.size());
  std::iota(base.begin(), base.end(), 0);
  std::vector<Order> orders(6, base);
  // Long lives at the bottom: saved for the backward part first, as they nest, then what comes and goes between them.
  std::sort(orders[0].begin(), orders[0].end(), [&](int32_t a, int32_t b) {
    return life(a) != life(b)                   ? life(a) > life(b)
           : blocks[a].bytes != blocks[b].bytes ? blocks[a].bytes > blocks[b].bytes
                                                : a < b;
  });
  // What makes the peak, without a gap, then the rest by size.
  std::sort(orders[1].begin(), orders[1].end(), [&](int32_t a, int32_t b) {
    if (at_peak(a) != at_peak(b)) return at_peak(a);
    if (at_peak(a)) return life(a) != life(b) ? life(a) > life(b) : a < b;
    return blocks[a].bytes != blocks[b].bytes ? blocks[a].bytes > blocks[b].bytes
           : life(a) != life(b)               ? life(a) > life(b)
                                              : a < b;
  });
  std::sort(orders[2].begin(), orders[2].end(), [&](int32_t a, int32_t b) {
    return blocks[a].bytes != blocks[b].bytes ? blocks[a].bytes > blocks[b].bytes
           : life(a) != life(b)               ? life(a) > life(b)
                                              : a < b;
  });
  // Bytes times life.
  std::sort(orders[3].begin(), orders[3].end(), [&](int32_t a, int32_t b) {
    const auto area = [&](int32_t id) { return static_cast<__int128>(blocks[id].bytes) * life(id); };
    return area(a) != area(b) ? area(a) > area(b) : a < b;
  });
  // As they come; and what stays longest at the bottom: gradients that pile up where saved activations go.
  const auto first = [&](int32_t id) { return blocks[id].spans.front().first; };
  const auto last = [&](int32_t id) { return blocks[id].spans.back().last; };
  std::sort(orders[4].begin(), orders[4].end(), [&](int32_t a, int32_t b) {
    return first(a) != first(b) ? first(a) < first(b) : last(a) != last(b) ? last(a) > last(b) : a < b;
  });
  std::sort(orders[5].begin(), orders[5].end(), [&](int32_t a, int32_t b) {
    return last(a) != last(b) ? last(a) > last(b) : first(a) != first(b) ? first(a) > first(b) : a < b;
  });
  return orders;
}

}  // namespace

void LiveOf(const std::vector<ArenaBlock>& blocks, ArenaPacking& packing) {
  std::map<int32_t, int64_t> change;
  for (const ArenaBlock& b : blocks) {
    for (const LifeSpan& s : b.spans) {
      change[s.first] += b.bytes;
      change[s.last + 1] -= b.bytes;
    }
  }
  packing.live = 0;
  packing.live_at = -1;
  int64_t live = 0;
  for (const auto& [time, bytes] : change) {
    live += bytes;
    if (live > packing.live) {
      packing.live = live;
      packing.live_at = time;
    }
  }
}

ArenaPacking PackArena(const std::vector<ArenaBlock>& blocks) {
  ArenaPacking best;
  LiveOf(blocks, best);
  best.offsets.assign(blocks.size(), 0);
  if (blocks.empty()) return best;
  constexpr int64_t kWork = int64_t{200} << 20;  // neighbours looked at: about a second
  int64_t work = 0;
  std::vector<int64_t> offsets(blocks.size(), 0);
  best.top = INT64_MAX;
  const auto keep = [&] {
    best.offsets = offsets;
    best.top = 0;
    for (size_t i = 0; i < blocks.size(); ++i) best.top = std::max(best.top, offsets[i] + blocks[i].bytes);
  };
  const auto good = [&] { return best.top - best.live <= best.live / 1000; };  // 0.1 %
  std::vector<Order> orders = Orders(blocks, best.live_at);
  size_t leads = 0;
  for (size_t i = 0; i < orders.size(); ++i) {
    if (PlaceAll(blocks, orders[i], best.top, offsets, work) != kNobody) continue;
    keep();
    if (good()) return best;
    leads = i;
  }
  // What sticks out goes first next time; from the best order, then from the others.
  std::swap(orders[0], orders[leads]);
  for (Order& order : orders) {
    for (int round = 0; round < 150 && work < kWork && !good(); ++round) {
      const int32_t out = PlaceAll(blocks, order, best.top, offsets, work);
      if (out == kNobody) {
        keep();
        continue;
      }
      const auto place = std::find(order.begin(), order.end(), out);
      std::rotate(order.begin(), place, place + 1);
    }
  }
  return best;
}

Status CheckPacking(const std::vector<ArenaBlock>& blocks, const std::vector<int64_t>& offsets, int64_t top) {
  if (offsets.size() != blocks.size())
    return MakeError("there are ", blocks.size(), " blocks and ", offsets.size(), " offsets");
  struct Event {
    int32_t time;
    bool begin;
    int32_t id;
  };
  std::vector<Event> events;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (offsets[i] < 0 || offsets[i] % kArenaAlignment != 0 || blocks[i].bytes % kArenaAlignment != 0) {
      return MakeError("block ", i, " at ", offsets[i], " is not aligned to ", kArenaAlignment, " bytes");
    }
    if (offsets[i] + blocks[i].bytes > top) return MakeError("block ", i, " ends above the top of the arena, ", top);
    for (const LifeSpan& s : blocks[i].spans) {
      if (s.last < s.first) return MakeError("block ", i, " has a span that ends before it begins");
      events.push_back({s.first, true, static_cast<int32_t>(i)});
      events.push_back({s.last + 1, false, static_cast<int32_t>(i)});
    }
  }
  // At one time ends come before beginnings.
  std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    return a.time != b.time ? a.time < b.time : a.begin != b.begin ? !a.begin : a.id < b.id;
  });
  std::map<int64_t, int32_t> live;  // offset → block
  for (const Event& e : events) {
    if (blocks[e.id].bytes == 0) continue;
    if (!e.begin) {
      live.erase(offsets[e.id]);
      continue;
    }
    const auto [it, fresh] = live.emplace(offsets[e.id], e.id);
    int32_t other = fresh ? -1 : it->second;
    if (const auto next = std::next(it);
        fresh && next != live.end() && next->first < offsets[e.id] + blocks[e.id].bytes) {
      other = next->second;
    }
    if (fresh && it != live.begin()) {
      const auto before = std::prev(it);
      if (before->first + blocks[before->second].bytes > offsets[e.id]) other = before->second;
    }
    if (other >= 0) return MakeError("blocks ", other, " and ", e.id, " overlap at time ", e.time);
  }
  return Ok{};
}

}  // namespace interlace
