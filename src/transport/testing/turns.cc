#include "transport/testing/turns.h"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace interlace {

namespace {

constexpr int64_t kTickNs = 2'000;          // what a turn takes
constexpr int64_t kOverNs = 1'000'000'000;  // and when it is over, so that every deadline comes
constexpr int64_t kMostTurns = 2'000'000;   // of one run

}  // namespace

uint64_t Draw::Bits() {
  uint64_t z = state_ += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

int64_t Draw::OfAnySize(int64_t end) {
  int bits = 0;
  while (int64_t{1} << (bits + 1) < end) ++bits;
  return std::min(end - 1, Between(1, int64_t{2} << Between(0, bits)));
}

void Turns::Run(const std::vector<std::function<void()>>& works) {
  for (size_t i = 0; i < works.size(); ++i) {
    threads_.push_back(std::make_unique<Thread>());
    sem_init(&threads_.back()->turn, 0, 0);
  }
  // All on one core: the turn is handed over twice as fast, and never do two of them run.
  cpu_set_t here;
  CPU_ZERO(&here);
  CPU_SET(sched_getcpu(), &here);
  current_ = Choose();
  std::vector<std::jthread> threads;
  for (size_t i = 0; i < works.size(); ++i) {
    threads.emplace_back([this, i, work = &works[i]] {
      sem_wait(&threads_[i]->turn);
      (*work)();
      threads_[i]->ended = true;
      HandOver(static_cast<int>(i));
    });
    pthread_setaffinity_np(threads.back().native_handle(), sizeof here, &here);
  }
  sem_post(&threads_[current_]->turn);
}

void Turns::Tick() {
  Advance(now_ns_ + (over_ ? kOverNs : kTickNs));
  over_ |= ++turns_ > kMostTurns;
}

void Turns::Pause() {
  Tick();
  if (stopped(current_) || draw_.OneIn(3)) HandOver(current_);
}

void Turns::Wait(std::function<bool()> ready, int64_t until_ns) {
  Thread& self = *threads_[current_];
  self.ready = std::move(ready);
  self.until = until_ns;
  Pause();
  if (self.ready && !self.ready() && now_ns_ < self.until && !over_) HandOver(current_);
  self.ready = nullptr;
}

void Turns::Advance(int64_t to_ns) {
  now_ns_ = std::max(now_ns_, to_ns);
  while (!timers_.empty() && timers_.begin()->first <= now_ns_) {
    const std::function<void()> happens = std::move(timers_.begin()->second);
    timers_.erase(timers_.begin());
    if (happens) happens();
  }
  over_ |= now_ns_ > limit_ns_;
}

// Who has the next turn; -1: all have ended.
int Turns::Choose() {
  while (true) {
    std::vector<int> able;
    bool any = false;
    int64_t next = timers_.empty() ? kNever : timers_.begin()->first;
    for (int i = 0; i < static_cast<int>(threads_.size()); ++i) {
      const Thread& thread = *threads_[i];
      if (thread.ended) continue;
      any = true;
      if (over_ || (!stopped(i) && (!thread.ready || now_ns_ >= thread.until || thread.ready()))) {
        able.push_back(i);
      } else {
        next = std::min(next, stopped(i) ? thread.stopped_until : thread.until);
      }
    }
    if (!any) return -1;
    if (!able.empty()) return able[draw_.Below(static_cast<int64_t>(able.size()))];
    if (next == kNever) {
      for (const auto& thread : threads_) over_ |= !thread->ended && thread->stopped_until <= now_ns_;
      for (const auto& thread : threads_) thread->stopped_until = 0;
    } else {
      Advance(next);
    }
  }
}

void Turns::HandOver(int from) {
  const int next = Choose();
  current_ = next;
  if (next == from) return;
  const bool ended = threads_[from]->ended;
  if (next >= 0) sem_post(&threads_[next]->turn);
  while (!ended && sem_wait(&threads_[from]->turn) != 0) {
  }
}

}  // namespace interlace
