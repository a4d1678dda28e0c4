#include "tier/host_lane.h"

#include <utility>

namespace interlace {

HostLane::~HostLane() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

HostLane::Ticket HostLane::Start(std::function<Status()> job) {
  if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
  Ticket ticket;
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    ticket = ++started_;
  }
  changed_.notify_all();
  return ticket;
}

Status HostLane::Wait(Ticket ticket) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return ended_ >= ticket; });
  if (failed_ > 0 && failed_ <= ticket) return MakeError("an optimizer step on the host failed: ", failure_);
  return Ok{};
}

Status HostLane::WaitAll() {
  return Wait(started_);  // only the thread that waits changes it
}

void HostLane::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    std::function<Status()> job = std::move(jobs_.front());
    jobs_.pop_front();
    if (failed_ == 0) {
      lock.unlock();
      const Status status = job();
      job = nullptr;  // what it holds goes before anybody hears that it has ended
      lock.lock();
      if (!status.ok()) {
        failure_ = status.error().ToString();
        failed_ = ended_ + 1;
      }
    }
    ++ended_;
    changed_.notify_all();
  }
}

}  // namespace interlace
