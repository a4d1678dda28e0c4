// turns.h — threads of which exactly one runs at a time, on a clock of their own, by a seed: the same seed gives the same
// turns. A turn ends in Pause or Wait; time goes on by a little with each turn, and in a leap to the next thing to happen
// when all threads wait. So an hour of waiting takes no time, and no run depends on the machine it is on.
#pragma once

#include <semaphore.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <vector>

namespace interlace {

inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// Numbers from a seed, the same with every library (std's distributions are not). Source: splitmix64, S. Vigna.
class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(seed) {}
  uint64_t Bits();
  // In [0, end).
  int64_t Below(int64_t end) { return static_cast<int64_t>(Bits() % static_cast<uint64_t>(end)); }
  int64_t Between(int64_t first, int64_t last) { return first + Below(last - first + 1); }
  // As many small ones as large ones, in [1, end).
  int64_t OfAnySize(int64_t end);
  bool OneIn(int64_t n) { return Below(n) == 0; }

 private:
  uint64_t state_;
};

class Turns {
 public:
  // At `limit_ns` it is over: whoever still waits then hangs.
  Turns(uint64_t seed, int64_t limit_ns) : draw_(seed), limit_ns_(limit_ns) {}
  // Runs each on a thread, and returns when all have ended.
  void Run(const std::vector<std::function<void()>>& works);
  int64_t now() const { return now_ns_; }
  bool over() const { return over_; }
  Draw& draw() { return draw_; }

  // Of the thread that has the turn; others may have the next one.
  int self() const { return current_; }
  void Pause();
  // A little time goes by, and nothing else.
  void Tick();
  // Until ready(), which any thread may ask, or `until_ns`.
  void Wait(std::function<bool()> ready, int64_t until_ns);
  void Sleep(int64_t ns) {
    Wait([] { return false; }, now_ns_ + ns);
  }
  // Calls it when its time has come; whoever is ready then is looked at.
  void At(int64_t time_ns, std::function<void()> happens = {}) { timers_.emplace(time_ns, std::move(happens)); }
  // The thread has no turns until then; kNever: until all others have ended.
  void Stop(int thread, int64_t until_ns) { threads_[thread]->stopped_until = until_ns; }
  bool stopped(int thread) const { return threads_[thread]->stopped_until > now_ns_; }

 private:
  struct Thread {
    std::function<bool()> ready;  // null: it does not wait
    int64_t until = kNever, stopped_until = 0;
    bool ended = false;
    sem_t turn;
  };
  void Advance(int64_t to_ns);
  int Choose();
  void HandOver(int from);

  Draw draw_;
  const int64_t limit_ns_;
  int64_t now_ns_ = 1'000'000'000;  // of the threads, in turn
  int64_t turns_ = 0;
  bool over_ = false;
  std::multimap<int64_t, std::function<void()>> timers_;
  std::vector<std::unique_ptr<Thread>> threads_;
  int current_ = -1;
};

}  // namespace interlace
