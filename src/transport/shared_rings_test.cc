#include "transport/shared_rings.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/testing/rounds.h"

namespace interlace {
namespace {

constexpr uint64_t kRing = 1 << 20;

// Both ends of a connection, and its socket.
struct Pair {
  std::array<std::unique_ptr<SharedRings>, 2> ends;
  int sockets[2] = {-1, -1};
  Pair() {
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, sockets), 0);
    ends[0] = SharedRings::Create(kRing);
    ends[1] = SharedRings::Open(ends[0]->offer());
    EXPECT_NE(ends[1], nullptr);
  }
  ~Pair() {
    for (const int socket : sockets) {
      if (socket >= 0) close(socket);
    }
  }
  ssize_t Send(int side, std::string bytes) { return Move(side, bytes, /*send=*/true); }
  std::string Receive(int side, size_t most) {
    std::string bytes(most, '?');
    const ssize_t got = Move(side, bytes, /*send=*/false);
    return got < 0 ? std::string("error ") + std::strerror(errno) : bytes.substr(0, static_cast<size_t>(got));
  }
  // In pieces of which one is empty.
  ssize_t Move(int side, std::string& bytes, bool send) {
    const size_t half = bytes.size() / 2;
    iovec pieces[] = {{bytes.data(), half}, {nullptr, 0}, {bytes.data() + half, bytes.size() - half}};
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = 3;
    SharedRings& end = *ends[static_cast<size_t>(side)];
    return send ? end.Send(SystemCalls(), sockets[side], message) : end.Receive(SystemCalls(), sockets[side], message);
  }
  void Sleep(int side, bool for_bytes, bool for_room) {
    pollfd ready{sockets[side], POLLIN, 0};
    SharedRings& end = *ends[static_cast<size_t>(side)];
    if (end.MaySleep(for_bytes, for_room)) {
      EXPECT_EQ(poll(&ready, 1, 20'000), 1) << "nobody woke it up";
    }
    end.Wake(SystemCalls(), sockets[side]);
  }
};

TEST(SharedRings, BytesComeInOrderBothWays) {
  Pair pair;
  EXPECT_EQ(pair.Receive(1, 9), std::string("error ") + std::strerror(EAGAIN));
  EXPECT_EQ(pair.Send(0, "to one"), 6);
  EXPECT_EQ(pair.Send(1, "to zero"), 7);
  EXPECT_EQ(pair.Receive(1, 4), "to o");
  EXPECT_EQ(pair.Receive(1, 9), "ne");
  EXPECT_EQ(pair.Receive(0, 9), "to zero");
  std::string all(kRing - 5, 'a');
  EXPECT_EQ(pair.Send(0, all), static_cast<ssize_t>(all.size()));
  EXPECT_EQ(pair.Send(0, "0123456789"), 5);  // what there is room for
  EXPECT_EQ(pair.Send(0, "x"), -1);
  EXPECT_EQ(errno, EAGAIN);
  EXPECT_EQ(pair.Receive(1, all.size()), all);
  EXPECT_EQ(pair.Receive(1, 9), "01234");
}

// What one side writes the other one reads, whichever of them is faster, and each sleeps when it has nothing to do.
TEST(SharedRings, NobodySleepsForGood) {
  for (uint64_t seed = 0; seed < static_cast<uint64_t>(Rounds(6)); ++seed) {
    Pair pair;
    constexpr size_t kBytes = size_t{40} << 20;
    const auto byte_at = [](size_t at) { return static_cast<char>(at * 2654435761U >> 13); };
    std::vector<std::jthread> threads;
    for (const int side : {0, 1}) {
      threads.emplace_back([&, side] {
        std::mt19937_64 random(2 * seed + static_cast<uint64_t>(side));
        const size_t most = seed % 2 == 0 ? 200 << 10 : 3000;
        const size_t wanted = seed % 2 == 0 ? kBytes : kBytes / 40;
        size_t sent = 0, received = 0;
        while (sent < wanted || received < wanted) {
          bool moved = false;
          if (sent < wanted) {
            std::string bytes(std::min<size_t>(1 + random() % most, wanted - sent), 0);
            for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = byte_at(sent + i);
            const ssize_t n = pair.Send(side, bytes);
            if (n > 0) sent += static_cast<size_t>(n), moved = true;
          }
          if (received < wanted && random() % 3 != 0) {
            const std::string bytes = pair.Receive(side, std::min<size_t>(1 + random() % most, wanted - received));
            if (bytes.rfind("error", 0) == 0) {
              ASSERT_EQ(errno, EAGAIN);
            } else {
              for (size_t i = 0; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], byte_at(received + i));
              received += bytes.size(), moved = true;
            }
          }
          if (!moved) pair.Sleep(side, received < wanted, sent < wanted);
          if (random() % 64 == 0) std::this_thread::yield();
        }
      });
    }
  }
}

TEST(SharedRings, WhatAPeerSaidBeforeItWentIsRead) {
  Pair pair;
  EXPECT_EQ(pair.Send(0, "last words"), 10);
  pair.ends[0].reset();
  close(std::exchange(pair.sockets[0], -1));
  pair.Sleep(1, /*for_bytes=*/true, /*for_room=*/true);
  EXPECT_EQ(pair.Receive(1, 4), "last");
  EXPECT_EQ(pair.Send(1, "x"), -1);
  EXPECT_EQ(errno, EPIPE);
  EXPECT_EQ(pair.Receive(1, 99), " words");
  EXPECT_EQ(pair.Receive(1, 99), "");
}

TEST(SharedRings, AnotherProcessOpensThem) {
  Pair pair;
  pair.ends[0] = SharedRings::Create(kRing);
  const pid_t child = fork();
  if (child == 0) {
    pair.ends[1] = SharedRings::Open(pair.ends[0]->offer());
    _exit(pair.ends[1] != nullptr && pair.Send(1, "from the child") == 14 ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(pair.Receive(0, 99), "from the child");
}

TEST(SharedRings, OfManyRanksAreSmall) {
  EXPECT_EQ(SharedRings::RingBytes(1), 4u << 20);
  EXPECT_EQ(SharedRings::RingBytes(3), 4u << 20);
  EXPECT_EQ(SharedRings::RingBytes(7), 1u << 20);
  EXPECT_EQ(SharedRings::RingBytes(1000), 64u << 10);
}

TEST(SharedRings, WhatIsNotAnOfferIsNotOpened) {
  const std::unique_ptr<SharedRings> made = SharedRings::Create(kRing);
  RingOffer other = made->offer();
  other.token[3] ^= 1;
  EXPECT_EQ(SharedRings::Open(other), nullptr);
  other = made->offer();
  other.fd = 0;  // a terminal, a pipe, or a file
  EXPECT_EQ(SharedRings::Open(other), nullptr);
  other.fd = 1 << 20;
  EXPECT_EQ(SharedRings::Open(other), nullptr);
  EXPECT_EQ(SharedRings::Open({}), nullptr);
  other = made->offer();
  other.bytes *= 2;
  EXPECT_EQ(SharedRings::Open(other), nullptr);
  other.bytes = kRing + 1;
  EXPECT_EQ(SharedRings::Open(other), nullptr);
  other = made->offer();
  made->WithdrawOffer();
  EXPECT_EQ(SharedRings::Open(other), nullptr);
}

}  // namespace
}  // namespace interlace
