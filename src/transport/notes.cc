#include "transport/notes.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <sstream>

#include "base/crc32c.h"

namespace interlace {

namespace {

// "rank 1", "ranks 1 and 2 (0 and 1 on axis dp)".
std::string RankNames(const int32_t* ranks, int32_t count, const RankGroup& group) {
  std::ostringstream out;
  out << (count == 1 ? "rank " : "ranks ");
  bool global = false;
  for (int32_t i = 0; i < count; ++i) {
    const int64_t name = ranks[i] >= 0 && ranks[i] < group.size() ? group.ranks[ranks[i]] : ranks[i];
    global |= name != ranks[i];
    out << (i == 0 ? "" : i + 1 == count ? " and " : ", ") << name;
  }
  if (global) {
    out << " (";
    for (int32_t i = 0; i < count; ++i) out << (i ? ", " : "") << ranks[i];
    out << " on axis " << group.axis << ")";
  }
  return out.str();
}

}  // namespace

Note::Note(Kind kind, const std::vector<int>& ranks, const std::string& label, double seconds)
    : kind(kind), seconds(static_cast<float>(seconds)) {
  label.copy(this->label, sizeof(this->label) - 1);
  for (int rank : ranks) Add(rank);
}

void Note::Add(int rank) {
  if (count < static_cast<int32_t>(std::size(ranks)) && !Has(rank)) ranks[count++] = rank;
}

bool Note::Has(int rank) const {
  return std::find(ranks, ranks + count, rank) != ranks + count;
}

uint32_t Note::Sum() const {
  return Crc32c(0, this, offsetof(Note, sum));
}

void Note::Sanitize() {
  count = std::clamp<int32_t>(count, 0, std::size(ranks));
  const std::string printable = Printable(label, sizeof(label) - 1);
  std::memset(label, 0, sizeof label);
  printable.copy(label, sizeof(label) - 1);
}

std::string Printable(const char* text, size_t size) {
  std::string out(text, strnlen(text, size));
  std::replace_if(
      out.begin(), out.end(), [](char c) { return c < 32 || c > 126; }, '?');
  return out;
}

Verdict Judge(int rank, const Note& own, const std::vector<Witness>& peers) {
  const int size = static_cast<int>(peers.size());
  const auto add = [](Note& note, int culprit) { note.Add(culprit); };
  // 1. Whom this rank waits for and who closed without a word: lost, whatever others say.
  Note lost = own;
  lost.kind = Note::kLost;
  lost.count = 0;
  for (int peer = 0; peer < size; ++peer) {
    const Witness& w = peers[peer];
    if (own.Has(peer) && w.closed && w.broken && !w.note) add(lost, peer);
  }
  if (lost.count > 0) return {lost, -1};
  if (own.kind == Note::kMismatch || own.kind == Note::kDamaged) return {own, -1};
  // 2. Somebody saw a rank go, or operations that differ: that explains all the waiting.
  for (int peer = 0; peer < size; ++peer) {
    if (peers[peer].note && peers[peer].note->kind != Note::kTimedOut) return {*peers[peer].note, peer};
  }
  // 3. Connections that broke and say nothing at all.
  for (int peer = 0; peer < size; ++peer) {
    if (own.Has(peer) && peers[peer].broken && !peers[peer].note) add(lost, peer);
  }
  if (lost.count > 0) return {lost, -1};
  // 4. Waiting: for whom somebody waits and who says nothing.
  Note silent = own;
  silent.kind = Note::kTimedOut;
  std::vector<int32_t> waited_for(own.ranks, own.ranks + own.count);
  std::optional<Verdict> accusation;
  for (int peer = 0; peer < size; ++peer) {
    if (!peers[peer].note) continue;
    const Note& told = *peers[peer].note;
    silent.seconds = std::max(silent.seconds, told.seconds);
    waited_for.insert(waited_for.end(), told.ranks, told.ranks + told.count);
    if (told.Has(rank) && !accusation) accusation = Verdict{told, peer};
  }
  silent.count = 0;
  for (int32_t culprit : waited_for) {
    if (culprit >= 0 && culprit < size && culprit != rank && !peers[culprit].note) add(silent, culprit);
  }
  std::sort(silent.ranks, silent.ranks + silent.count);
  if (silent.count > 0) return {silent, -1};
  // 5. All have spoken. A connection is stuck between two that wait for one another, first those that have waited for
  // longest; or one of them was late, for whom more ranks wait.
  const auto told = [&](int who) { return who == rank ? &own : peers[who].note ? &*peers[who].note : nullptr; };
  const auto waits = [&](int who, int whom) { return told(who) != nullptr && told(who)->Has(whom); };
  const auto waiters = [&](int whom) {
    int count = whom == rank;  // of two alike this rank hears that it is waited for
    for (int who = 0; who < size; ++who) count += waits(who, whom) ? 2 : 0;
    return count;
  };
  Verdict stuck;
  for (int a = 0; a < size; ++a) {
    for (int b = 0; b < size; ++b) {
      if (!waits(a, b) || !waits(b, a) || waiters(a) > waiters(b)) continue;
      const float seconds = std::max(told(a)->seconds, told(b)->seconds);
      if (stuck.note.count > 0 && stuck.note.seconds >= seconds) continue;
      stuck = {Note(Note::kTimedOut, {b}, told(a)->label, seconds), a == rank ? -1 : a};
    }
  }
  if (stuck.note.count > 0) return stuck;
  if (accusation) return *accusation;
  for (int peer = 0; peer < size; ++peer) {
    if (peers[peer].note && peers[peer].note->count == 0) return {Note(Note::kDamaged, {peer}, own.label, 0), -1};
  }
  return {own, -1};  // all wait for one another
}

std::string Explain(const Verdict& verdict, const RankGroup& group, const std::string& label) {
  const Note& note = verdict.note;
  const std::string names = RankNames(note.ranks, note.count, group);
  std::ostringstream out;
  out.precision(2);
  out << std::fixed << label << " on axis " << group.axis << ": ";
  const int32_t reporter = verdict.reporter;
  if (reporter >= 0 && note.kind != Note::kMismatch && note.kind != Note::kDamaged && note.Has(group.index)) {
    out << RankNames(&reporter, 1, group) << " stopped waiting for this rank (" << group.index << ") after "
        << note.seconds << " s in " << note.label;
    return out.str();
  }
  switch (note.kind) {
    case Note::kTimedOut:
      out << names << " did not answer for " << note.seconds << " s (timed out: stuck, or slower than the timeout)";
      break;
    case Note::kMismatch:
      out << names << " started another operation";
      break;
    case Note::kDamaged:
      out << "what " << names << " sent was damaged on the way";
      break;
    default:
      out << names << (note.count == 1 ? " was" : " were") << " lost after " << note.seconds
          << " s: its process ended or its connection broke";
  }
  if (reporter >= 0) out << ", reported by " << RankNames(&reporter, 1, group) << " in " << note.label;
  return out.str();
}

}  // namespace interlace
