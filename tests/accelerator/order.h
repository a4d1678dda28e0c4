// order.h — the order checker: for every byte of memory the last op that wrote it and those that have read it since; for
// every stream, and for the host, what is known to be over (a vector clock). An op that touches what another stream
// touches, of which its own stream does not know that it is over, has not waited: that is reported when it is issued,
// whatever order the ops are carried out in.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace soft {

struct Access {
  const char* begin;
  const char* end;
  bool write;
};

// By stream: its ops up to this one are over.
class Clock {
 public:
  uint64_t operator[](int stream) const {
    return static_cast<size_t>(stream) < at_.size() ? at_[static_cast<size_t>(stream)] : 0;
  }
  void Set(int stream, uint64_t seq);
  void Join(const Clock& other);

 private:
  std::vector<uint64_t> at_;
};

class Order {
 public:
  bool on = true;
  // Op `seq` of a stream that knows `clock` touches these. Calls report for every wait that is missing.
  void Check(int stream, uint64_t seq, const Clock& clock, const char* name, const std::vector<Access>& touched,
             const std::function<void(const std::string&)>& report);
  void Forget(const char* begin, const char* end);

 private:
  struct Cell {
    const char* end;
    int writer = -1;
    uint64_t wrote = 0;
    const char* name = "";
    std::vector<std::pair<int, uint64_t>> readers;
  };
  void Split(const char* at);
  std::map<const char*, Cell> cells_;  // by first byte; they do not overlap
};

}  // namespace soft
