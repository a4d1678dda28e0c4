#include "runtime/host_lane.h"

#include <utility>

#include "runtime/step_scope.h"

namespace interlace {

HostLane::~HostLane() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

HostLane::Ticket HostLane::Start(std::function<void()> job) {
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
  const StepScope scope{c10::Device(c10::kCPU)};
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    if (failed_ == 0) {
      lock.unlock();
      std::string failure;
      bool failed = false;
      try {
        job();
      } catch (const std::exception& error) {
        failure = MessageOf(error);
        failed = true;
      }
      lock.lock();
      if (failed) {
        failure_ = std::move(failure);
        failed_ = ended_ + 1;
      }
    }
    ++ended_;
    changed_.notify_all();
  }
}

}  // namespace interlace
