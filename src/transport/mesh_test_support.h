// For tests: ranks as threads of this process, connected over loopback, and peers whose bytes the test writes itself.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transport/mesh.h"
#include "transport/testing/wire.h"

namespace interlace {

// Calls work(rank) on a thread for each rank.
inline void OnEachRank(int size, const std::function<void(int)>& work) {
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back([&work, rank] { work(rank); });
}

// Where the threads of a group meet to exchange bytes.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size), said_(size) {}
  ExchangeBytes For(int rank) {
    return [this, rank](const std::string& mine) -> Result<std::vector<std::string>> {
      std::unique_lock lock(mutex_);
      said_[rank] = mine;
      const int round = round_;
      if (++here_ == size_) {
        here_ = 0;
        ++round_;
        all_ = said_;
        changed_.notify_all();
      } else {
        changed_.wait(lock, [&] { return round_ != round; });
      }
      return all_;
    };
  }

 private:
  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> said_, all_;
  int here_ = 0, round_ = 0;
};

inline std::vector<int64_t> RanksTo(int size) {
  std::vector<int64_t> ranks(size);
  for (int i = 0; i < size; ++i) ranks[i] = i;
  return ranks;
}

// Each rank's connections to all others, over TCP or through memory.
inline std::vector<std::vector<PeerSockets>> ConnectRanks(const std::string& axis, const std::vector<int64_t>& ranks,
                                                          bool shares_memory = false) {
  const int size = static_cast<int>(ranks.size());
  std::vector<std::vector<PeerSockets>> sockets(size);
  Meeting meeting(size);
  OnEachRank(size, [&](int rank) {
    Result<std::vector<PeerSockets>> made =
        ConnectPeers({axis, ranks, rank}, meeting.For(rank), 30, SystemCalls(), shares_memory);
    ASSERT_TRUE(made.ok()) << made.error().ToString();
    for (int peer = 0; peer < size; ++peer) EXPECT_EQ((*made)[peer].rings != nullptr, shares_memory && peer != rank);
    sockets[rank] = std::move(*made);
  });
  return sockets;
}

// The meshes of a group's ranks.
inline std::vector<std::shared_ptr<Mesh>> MeshesOf(const std::string& axis, const std::vector<int64_t>& ranks,
                                                   MeshOptions options = {}, bool shares_memory = false) {
  std::vector<std::vector<PeerSockets>> sockets = ConnectRanks(axis, ranks, shares_memory);
  std::vector<std::shared_ptr<Mesh>> meshes;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank)
    meshes.push_back(std::make_shared<Mesh>(RankGroup{axis, ranks, rank}, std::move(sockets[rank]), options));
  return meshes;
}

inline std::string FrameOf(int32_t kind, uint64_t number, const std::string& tag, const std::string& payload) {
  WireHeader header;
  header.kind = kind;
  header.number = number;
  header.bytes = payload.size();
  tag.copy(header.tag, sizeof(header.tag) - 1);
  return Summed(std::string(reinterpret_cast<const char*>(&header), sizeof header) + payload);
}

}  // namespace interlace
