#include "order.h"

#include <algorithm>

namespace soft {

void Clock::Set(int stream, uint64_t seq) {
  if (at_.size() <= static_cast<size_t>(stream)) at_.resize(static_cast<size_t>(stream) + 1);
  at_[static_cast<size_t>(stream)] = seq;
}

void Clock::Join(const Clock& other) {
  if (at_.size() < other.at_.size()) at_.resize(other.at_.size());
  for (size_t i = 0; i < other.at_.size(); ++i) at_[i] = std::max(at_[i], other.at_[i]);
}

void Order::Split(const char* at) {
  auto it = cells_.upper_bound(at);
  if (it == cells_.begin()) return;
  --it;
  if (it->first == at || it->second.end <= at) return;
  Cell right = it->second;
  it->second.end = at;
  cells_.emplace(at, std::move(right));
}

void Order::Forget(const char* begin, const char* end) {
  Split(begin);
  Split(end);
  cells_.erase(cells_.lower_bound(begin), cells_.lower_bound(end));
}

void Order::Check(int stream, uint64_t seq, const Clock& clock, const char* name, const std::vector<Access>& touched,
                  const std::function<void(const std::string&)>& report) {
  if (!on) return;
  const auto over = [&](int other, uint64_t at) { return other == stream || clock[other] >= at; };
  const auto tell = [&](const char* what, const std::string& other, int where, const Access& a) {
    report(std::string(name) + " on stream " + std::to_string(stream) + " " + what + " " + other + " on stream " +
           std::to_string(where) + " (" + std::to_string(a.end - a.begin) + " bytes)");
  };
  for (const Access& a : touched) {
    if (a.begin >= a.end) continue;
    Split(a.begin);
    Split(a.end);
    auto it = cells_.lower_bound(a.begin);
    for (const char* at = a.begin; at < a.end; ++it) {
      if (it == cells_.end() || it->first > at) {
        const char* end = it == cells_.end() ? a.end : std::min(a.end, it->first);
        it = cells_.emplace(at, Cell{end, -1, 0, "", {}}).first;
      }
      Cell& cell = it->second;
      if (cell.writer >= 0 && !over(cell.writer, cell.wrote)) {
        tell(a.write ? "overwrites without a wait what is written by" : "reads without a wait what is written by",
             cell.name, cell.writer, a);
        cell.writer = -1;  // told once
      }
      const auto known = std::find_if(cell.readers.begin(), cell.readers.end(),
                                      [&](const auto& reader) { return reader.first == stream; });
      if (!a.write && known != cell.readers.end()) {
        known->second = seq;
      } else if (!a.write) {
        cell.readers.emplace_back(stream, seq);
      } else {
        for (const auto& [reader, read] : cell.readers) {
          if (!over(reader, read)) tell("overwrites without a wait what is read by", "an op", reader, a);
        }
      }
      at = cell.end;
    }
    if (a.write) {
      cells_.erase(cells_.lower_bound(a.begin), cells_.lower_bound(a.end));
      cells_.emplace(a.begin, Cell{a.end, stream, seq, name, {}});
    }
  }
}

}  // namespace soft
