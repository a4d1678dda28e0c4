#include "runtime/comm_threads.h"

#include <sched.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace interlace {

namespace {

bool Wanted() {
  const char* set = std::getenv("INTERLACE_REALTIME");
  return set == nullptr || std::string_view(set) != "0";
}

// `thread` 0 is the calling one. A refusal is no error: the thread stays as it is.
void Raise(int thread) {
  sched_param param{};
  param.sched_priority = 1;  // the lowest: above all that compute, below what the system itself needs
  (void)sched_setscheduler(thread, SCHED_RR | SCHED_RESET_ON_FORK, &param);
}

}  // namespace

void RaiseGlooThreads() {
  if (!Wanted()) return;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", error)) {
    std::ifstream file(entry.path() / "comm");
    std::string name;
    std::getline(file, name);
    // "gloo_tcp_loop" and "pt_gloo_runloop": gloo's and torch's names.
    if (name.find("gloo") != std::string::npos) Raise(std::atoi(entry.path().filename().c_str()));
  }
}

void RaiseThisThread() {
  if (Wanted()) Raise(0);
}

}  // namespace interlace
