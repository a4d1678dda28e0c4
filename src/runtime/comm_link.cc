#include "runtime/comm_link.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <sstream>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

namespace interlace {

namespace {

constexpr int kTagLimit = 1 << 29;
constexpr int kNoteTag = 1 << 30;
// How long a rank that closed one group may take to send its note on the other.
constexpr int64_t kNotePatienceMs = 300;

// c10d and gloo report by exceptions. Of "[file:line] What happened [address]. Advice ...\n stack trace" only what
// happened is kept.
std::string FirstLine(const std::string& text) {
  const size_t begin = text.starts_with('[') && text.find("] ") != std::string::npos ? text.find("] ") + 2 : 0;
  return text.substr(begin, std::min(text.find('\n', begin), text.find(". ", begin)) - begin);
}

// Whether the transfer has ended well; gives its error otherwise. Blocks up to timeout_ms.
std::optional<std::string> WaitFor(c10d::Work& work, int64_t timeout_ms) {
  try {
    work.wait(std::chrono::milliseconds(std::max<int64_t>(timeout_ms, 1)));  // 0 would mean the group's own timeout
    return std::nullopt;
  } catch (const std::exception& e) {
    return FirstLine(e.what());
  }
}

}  // namespace

GlooLink::Note GlooLink::MakeNote(bool timed_out, int peer, const std::string& label, double seconds) {
  Note note;
  note.timed_out = timed_out ? 1 : 0;
  note.seconds = static_cast<float>(seconds);
  std::strncpy(note.label, label.c_str(), sizeof(note.label) - 1);
  note.Add(peer);
  return note;
}

Result<GlooLink::Direction> GlooLink::Resolve(const AxisSpec& spec, const std::string& name) {
  Direction direction;
  direction.name = name;
  try {
    direction.group = c10d::resolve_process_group(name);
    direction.backend = direction.group->getBackend(c10::DeviceType::CPU);
  } catch (const std::exception& e) {
    return MakeError("axis ", spec.name, ": no gloo process group named \"", name,
                     "\"; create it with torch.distributed.new_group and pass its group_name (", FirstLine(e.what()),
                     ")");
  }
  if (direction.backend->getRank() != spec.rank || direction.backend->getSize() != spec.size) {
    return MakeError("axis ", spec.name, ": process group \"", name, "\" says rank ", direction.backend->getRank(),
                     " of ", direction.backend->getSize(), ", the axis says rank ", spec.rank, " of ", spec.size);
  }
  return direction;
}

Result<std::shared_ptr<GlooLink>> GlooLink::Open(const AxisSpec& spec) {
  if (spec.up == spec.down) {
    return MakeError("axis ", spec.name, ": up and down are both \"", spec.up,
                     "\"; two groups are needed, one for each direction of transfer");
  }
  INTERLACE_ASSIGN(Direction up, Resolve(spec, spec.up));
  INTERLACE_ASSIGN(Direction down, Resolve(spec, spec.down));
  // Never destroyed: gloo's threads may outlive static destructors.
  static auto* const mutex = new std::mutex;
  static auto* const links = new std::vector<std::shared_ptr<GlooLink>>;
  std::lock_guard lock(*mutex);
  std::erase_if(*links, [](const std::shared_ptr<GlooLink>& link) {  // of groups that were destroyed
    const auto gone = [](const Direction& d) {
      try {
        return c10d::resolve_process_group(d.name) != d.group;
      } catch (const std::exception&) {
        return true;
      }
    };
    return link.use_count() == 1 && gone(link->up_) && gone(link->down_);
  });
  for (const auto& link : *links) {
    if (link->up_.group == up.group && link->down_.group == down.group) return link;
  }
  std::shared_ptr<GlooLink> link(new GlooLink);
  link->axis_ = spec.name;
  link->rank_ = static_cast<int>(spec.rank);
  link->size_ = static_cast<int>(spec.size);
  link->up_ = std::move(up);
  link->down_ = std::move(down);
  try {
    link->global_ranks_ = link->up_.backend->getBackendOptions()->global_ranks_in_group;
  } catch (const std::exception&) {  // a backend that has no options: ranks are named within the axis
  }
  if (link->global_ranks_.size() != static_cast<size_t>(spec.size)) link->global_ranks_.clear();
  try {
    link->PostNotes(link->up_);
    link->PostNotes(link->down_);
  } catch (const std::exception& e) {
    return MakeError("axis ", spec.name, ": cannot reach the other ranks: ", FirstLine(e.what()));
  }
  links->push_back(link);
  return link;
}

void GlooLink::PostNotes(Direction& direction) {
  direction.notes.resize(size_);
  direction.pending.resize(size_);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    direction.notes[peer] = at::empty({static_cast<int64_t>(sizeof(Note))}, at::kByte);
    std::vector<at::Tensor> tensors{direction.notes[peer]};
    direction.pending[peer] = direction.backend->recv(tensors, peer, kNoteTag);
  }
}

c10::intrusive_ptr<c10d::Work> GlooLink::Send(const at::Tensor& tensor, int peer, int tag) {
  std::vector<at::Tensor> tensors{tensor};
  return (rank_ < peer ? up_ : down_).backend->send(tensors, peer, tag);
}

c10::intrusive_ptr<c10d::Work> GlooLink::Receive(const at::Tensor& tensor, int peer, int tag) {
  std::vector<at::Tensor> tensors{tensor};
  return (peer < rank_ ? up_ : down_).backend->recv(tensors, peer, tag);
}

int GlooLink::NextTags(int count) {
  std::lock_guard lock(mutex_);
  if (next_tag_ + count > kTagLimit) next_tag_ = 0;
  const int first = next_tag_;
  next_tag_ += count;
  return first;
}

std::optional<Error> GlooLink::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void GlooLink::Bury(std::shared_ptr<void> transfers) {
  std::lock_guard lock(mutex_);
  buried_.push_back(std::move(transfers));
}

void GlooLink::Note::Add(int rank) {
  if (count < static_cast<int32_t>(std::size(ranks)) && !Has(rank)) ranks[count++] = rank;
}

bool GlooLink::Note::Has(int rank) const {
  return std::find(ranks, ranks + count, rank) != ranks + count;
}

void GlooLink::Warn(int peer, const std::string& label, double elapsed_s) {
  std::lock_guard lock(mutex_);
  if (failure_ || warned_) return;
  warned_ = true;
  TellOthers(MakeNote(true, peer, label, elapsed_s));
}

Error GlooLink::Fail(const Suspect& first, const std::vector<Suspect>& others, const std::string& what,
                     const std::string& label, double elapsed_s) {
  std::lock_guard lock(mutex_);
  if (failure_) return *failure_;
  const bool timed_out = what.find("imed out") != std::string::npos;
  Note own = MakeNote(timed_out, first.peer, label, elapsed_s);
  Direction& failed = first.up ? up_ : down_;
  Direction& other = first.up ? down_ : up_;
  Verdict verdict;
  if (timed_out) {
    // The group is closed now: what is unfinished in it fails at once, and what is finished does not.
    for (const Suspect& s : others) {
      if (s.work && s.up == first.up && WaitFor(*s.work, 1)) own.Add(s.peer);
    }
    verdict = Judge(failed, own);
    if (!warned_) TellOthers(own);
    for (const Suspect& s : others) {  // this may close the other group
      if (s.work && s.up != first.up && WaitFor(*s.work, 1) && verdict.reporter < 0) verdict.note.Add(s.peer);
    }
    if (verdict.reporter < 0) verdict = Judge(other, verdict.note);
  } else {
    // The lost peer may have left a note: it then stopped because of another rank.
    std::optional<Verdict> told = ReadNote(failed, first.peer, kNotePatienceMs);
    if (!told) told = ReadNote(other, first.peer, kNotePatienceMs);
    verdict = told ? *told : Verdict{own, -1};
    if (!warned_) TellOthers(verdict.note);
  }
  std::sort(verdict.note.ranks, verdict.note.ranks + verdict.note.count);
  std::string text = Explain(verdict, label);
  if (verdict.reporter < 0 && !timed_out) text += " (" + FirstLine(what) + ")";
  failure_ = Error{text + "; the group cannot be used any more: restart all ranks from the last checkpoint", {}};
  return *failure_;
}

void GlooLink::Leave() {
  std::lock_guard lock(mutex_);
  if (failure_) return;
  failure_ = Error{"this rank has left axis " + axis_ + "; compile again to go on", {}};
  // A wait that runs out of patience closes the group.
  for (Direction* direction : {&up_, &down_}) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && !ReadNote(*direction, peer, 1)) break;
    }
  }
}

GlooLink::Verdict GlooLink::Judge(Direction& direction, const Note& own) {
  Note waited_for = own;
  std::vector<bool> alive(size_, false);
  alive[rank_] = true;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const std::optional<Verdict> told = ReadNote(direction, peer, 1);
    if (!told) continue;
    if (!told->note.timed_out) return *told;  // a rank that was lost explains all the waiting
    alive[peer] = true;
    for (int32_t i = 0; i < told->note.count; ++i) waited_for.Add(told->note.ranks[i]);
  }
  Verdict verdict{own, -1};
  verdict.note.count = 0;
  for (int32_t i = 0; i < waited_for.count; ++i) {
    const int rank = waited_for.ranks[i];
    if (rank >= 0 && rank < size_ && !alive[rank]) verdict.note.Add(rank);
  }
  if (verdict.note.count == 0) verdict.note = own;  // all wait for one another
  return verdict;
}

std::optional<GlooLink::Verdict> GlooLink::ReadNote(Direction& direction, int peer, int64_t patience_ms) {
  if (!direction.pending[peer] || WaitFor(*direction.pending[peer], patience_ms)) return std::nullopt;
  Verdict verdict;
  std::memcpy(&verdict.note, direction.notes[peer].const_data_ptr(), sizeof(Note));
  verdict.reporter = peer;
  Note& note = verdict.note;  // bytes from another process
  note.count = std::clamp<int32_t>(note.count, 0, std::size(note.ranks));
  note.label[sizeof(note.label) - 1] = 0;
  return verdict;
}

void GlooLink::TellOthers(const Note& note) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(sizeof(Note))}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &note, sizeof(Note));
  for (Direction* direction : {&up_, &down_}) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      try {
        std::vector<at::Tensor> tensors{bytes};
        told_.push_back(direction->backend->send(tensors, peer, kNoteTag));
      } catch (const std::exception&) {  // the lost ones
      }
    }
  }
}

std::string GlooLink::RankNames(const int32_t* ranks, int32_t count) const {
  std::ostringstream out;
  out << (count == 1 ? "rank " : "ranks ");
  bool global = false;
  for (int32_t i = 0; i < count; ++i) {
    const bool known = ranks[i] >= 0 && static_cast<size_t>(ranks[i]) < global_ranks_.size();
    const int64_t name = known ? static_cast<int64_t>(global_ranks_[ranks[i]]) : ranks[i];
    global |= name != ranks[i];
    out << (i == 0 ? "" : i + 1 == count ? " and " : ", ") << name;
  }
  if (global) {
    out << " (";
    for (int32_t i = 0; i < count; ++i) out << (i ? ", " : "") << ranks[i];
    out << " on axis " << axis_ << ")";
  }
  return out.str();
}

std::string GlooLink::Explain(const Verdict& verdict, const std::string& label) const {
  const Note& note = verdict.note;
  const std::string names = RankNames(note.ranks, note.count);
  std::ostringstream out;
  out.precision(2);
  out << std::fixed << label << " on axis " << axis_ << ": ";
  const auto event = [&] {
    if (note.timed_out) {
      out << names << " did not answer for " << note.seconds << " s (timed out: stuck, or slower than the timeout)";
    } else {
      out << names << " was lost after " << note.seconds << " s: its process ended or its connection broke";
    }
  };
  if (verdict.reporter < 0) {
    event();
    return out.str();
  }
  const int32_t reporter = verdict.reporter;
  if (note.Has(rank_)) {
    out << RankNames(&reporter, 1) << " stopped waiting for this rank (" << rank_ << ") after " << note.seconds
        << " s in " << note.label;
    return out.str();
  }
  event();
  out << ", reported by " << RankNames(&reporter, 1) << " in " << note.label;
  return out.str();
}

}  // namespace interlace
