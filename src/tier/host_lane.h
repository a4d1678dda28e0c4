// host_lane.h — the lane `host`: one thread beside the step that makes optimizer steps on storages that are out, where
// they lie (docs/ir.md, "Steps on the host"). Jobs run one after another, in the order in which they were started.
//
//   step thread   ──Start(u0)──Start(u1)────── backward, forward ... ──Wait(u0)── reload u0 ──
//   host lane          [== u0 ==][== u1 ==][== u2 ==]
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "base/result.h"

namespace interlace {

class HostLane {
 public:
  using Ticket = int64_t;  // counts from 1

  HostLane() = default;
  ~HostLane();  // jobs that were started still run
  HostLane(const HostLane&) = delete;
  HostLane& operator=(const HostLane&) = delete;

  // One thread starts and waits. When a job fails, so have all after it.
  Ticket Start(std::function<Status()> job);
  // Until the job and all before it have ended. Error: one of them failed; those after it did not run.
  Status Wait(Ticket ticket);
  Status WaitAll();

 private:
  void Run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<Status()>> jobs_;
  Ticket started_ = 0, ended_ = 0;
  std::string failure_;
  Ticket failed_ = 0;  // the first that failed, or 0
  bool stop_ = false;
  std::thread thread_;  // begins with the first job
};

}  // namespace interlace
