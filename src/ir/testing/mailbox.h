// mailbox.h — messages between ranks, in the order they were sent, until they are received.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace interlace::testing {

class Mailbox {
 public:
  using Bytes = std::vector<std::byte>;

  // `shared`: by machines on several threads, so that a message that is not there yet is waited for.
  explicit Mailbox(bool shared = false) : shared_(shared) {}

  void Send(int64_t from, int64_t to, Bytes bytes) {
    const std::lock_guard lock(mutex_);
    messages_[{from, to}].push_back(std::move(bytes));
    arrived_.notify_all();
  }
  // Message `number` from one rank to another, once; nullopt: nobody sends it.
  std::optional<Bytes> Receive(int64_t from, int64_t to, size_t number) {
    std::unique_lock lock(mutex_);
    std::vector<Bytes>& box = messages_[{from, to}];
    arrived_.wait(lock, [&] { return box.size() > number || closed_ || !shared_; });
    if (box.size() <= number) return std::nullopt;
    return std::move(box[number]);
  }
  // Nobody sends any more.
  void Close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    arrived_.notify_all();
  }

 private:
  const bool shared_;
  bool closed_ = false;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<std::pair<int64_t, int64_t>, std::vector<Bytes>> messages_;  // by sender and receiver
};

}  // namespace interlace::testing
