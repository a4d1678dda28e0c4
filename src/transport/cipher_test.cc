#include "transport/cipher.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "transport/collectives.h"
#include "transport/mesh_test_support.h"

namespace interlace {
namespace {

class Sealed : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!FindCrypto().ok()) GTEST_SKIP() << "no libcrypto here";
  }
};

std::string FromHex(const std::string& hex) {
  std::string out;
  for (size_t i = 0; i < hex.size(); i += 2) out += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return out;
}

FrameTag TagFrom(const std::string& bytes) {
  FrameTag tag;
  std::memcpy(tag.data(), bytes.data(), sizeof tag);
  return tag;
}

struct Vector {
  const char *key, *nonce, *plain, *sealed, *tag;
};

// D. McGrew and J. Viega, The Galois/Counter Mode of operation, test cases 13 to 15; NIST CAVP, gcmEncryptExtIV256.
const Vector kVectors[] = {
    {"0000000000000000000000000000000000000000000000000000000000000000", "000000000000000000000000", "", "",
     "530f8afbc74536b9a963b4f1c4cb738b"},
    {"0000000000000000000000000000000000000000000000000000000000000000", "000000000000000000000000",
     "00000000000000000000000000000000", "cea7403d4d606b6e074ec5d3baf39d18", "d0d1c8a799996bf0265b98b5d48ab919"},
    {"feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308", "cafebabefacedbaddecaf888",
     "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
     "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b391aafd255",
     "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
     "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662898015ad",
     "b094dac5d93471bdec1a502270e3cc6c"},
    {"31bdadd96698c204aa9ce1448ea94ae1fb4a9a0b3c9d773b51bb1822666b8f22", "0d18e06c7c725ac9e362e1ce",
     "2db5168e932556f8089a0622981d017d", "fa4362189661d163fcd6a56d8bf0405a", "d636ac1bbedd5cc3ee727dc2ab4a9489"},
};

TEST_F(Sealed, TheVectorsOfTheStandardBothWaysInAnyPieces) {
  for (const Vector& vector : kVectors) {
    const std::string plain = FromHex(vector.plain), sealed = FromHex(vector.sealed), nonce = FromHex(vector.nonce);
    std::array<unsigned char, Cipher::kNonceBytes> bytes;
    std::memcpy(bytes.data(), nonce.data(), sizeof bytes);
    Cipher seal(std::string(32, 'k'), true), open(std::string(32, 'k'), false);
    for (const size_t step : {1, 7, 16, 1000}) {
      seal.BeginWith(FromHex(vector.key), bytes);
      open.BeginWith(FromHex(vector.key), bytes);
      std::string out(plain.size(), 0), back = sealed;  // the second where it lies
      for (size_t at = 0; at < plain.size(); at += step) {
        const size_t size = std::min(step, plain.size() - at);
        seal.Apply(plain.data() + at, out.data() + at, size);
        open.Apply(back.data() + at, back.data() + at, size);
      }
      EXPECT_EQ(out, sealed);
      EXPECT_EQ(back, plain);
      EXPECT_EQ(seal.Tag(), TagFrom(FromHex(vector.tag)));
      EXPECT_TRUE(open.Verify(TagFrom(FromHex(vector.tag))));
    }
  }
}

TEST_F(Sealed, NoBitOfAMessageItsTagOrItsNumberCanChange) {
  Cipher seal(std::string(32, 'k'), true), open(std::string(32, 'k'), false), other(std::string(32, 'l'), false);
  const std::string plain = "a header and the bytes behind it";
  const auto opens = [&](Cipher& cipher, uint64_t number, std::string text, const FrameTag& tag) {
    cipher.Begin(number);
    cipher.Apply(text.data(), text.data(), text.size());
    return cipher.Verify(tag);
  };
  constexpr uint64_t kNext = Cipher::kFramesOfKey;
  for (const uint64_t number : {uint64_t{0}, uint64_t{5}, kNext - 1, kNext, ~uint64_t{0}}) {
    std::string sealed = plain;
    seal.Begin(number);
    seal.Apply(plain.data(), sealed.data(), plain.size());
    const FrameTag tag = seal.Tag();
    EXPECT_TRUE(opens(open, number, sealed, tag));
    EXPECT_FALSE(opens(open, number + 1, sealed, tag));
    EXPECT_FALSE(opens(open, number ^ Cipher::kFramesOfKey, sealed, tag));
    EXPECT_FALSE(opens(other, number, sealed, tag));
    EXPECT_FALSE(opens(open, number, sealed.substr(1), tag));
    for (size_t bit = 0; bit < 8 * sealed.size(); ++bit) {
      std::string changed = sealed;
      changed[bit / 8] ^= static_cast<char>(1 << bit % 8);
      EXPECT_FALSE(opens(open, number, changed, tag));
    }
    for (size_t bit = 0; bit < 8 * sizeof tag; ++bit) {
      FrameTag changed = tag;
      changed[bit / 8] ^= static_cast<char>(1 << bit % 8);
      EXPECT_FALSE(opens(open, number, sealed, changed));
    }
    EXPECT_TRUE(opens(open, number, sealed, tag));
  }
}

TEST_F(Sealed, EachFrameAndEachStretchOfThemHasItsOwnStream) {
  std::vector<std::string> streams;
  Cipher seal(std::string(32, 'k'), true);
  constexpr uint64_t kNext = Cipher::kFramesOfKey;
  for (const uint64_t number : {uint64_t{0}, uint64_t{1}, kNext, kNext + 1, uint64_t{0}}) {
    std::string zeros(64, 0);
    seal.Begin(number);
    seal.Apply(zeros.data(), zeros.data(), zeros.size());
    streams.push_back(zeros);
  }
  EXPECT_EQ(streams[0], streams[4]);
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < i; ++j) EXPECT_NE(streams[i], streams[j]);
  }
}

TEST(Crypto, AMachineWithoutItIsToldWhatToInstall) {
  EXPECT_EQ(ErrorOf(FindCrypto({"libnothing.so.3", "libnothing.so"})),
            "encryption needs OpenSSL's libcrypto, and none is here (looked for libnothing.so.3, libnothing.so); install "
            "OpenSSL, for example: apt-get install libssl3, dnf install openssl-libs; or leave INTERLACE_ENCRYPT out");
}

// While it lives, this process has the secret of a run and is to encrypt.
struct Encrypting {
  Encrypting() {
    setenv("INTERLACE_MESH_KEY", std::string(64, 'a').c_str(), 1);
    setenv("INTERLACE_ENCRYPT", "1", 1);
  }
  ~Encrypting() {
    unsetenv("INTERLACE_MESH_KEY");
    unsetenv("INTERLACE_ENCRYPT");
  }
};

TEST_F(Sealed, EachConnectionAndEachWayHasAKeyOfItsOwn) {
  const Encrypting on;
  std::vector<std::string> keys;
  for (int time = 0; time < 2; ++time) {
    const auto sockets = ConnectRanks("dp", RanksTo(3));
    for (int a = 0; a < 3; ++a) {
      for (int b = 0; b < 3; ++b) {
        if (a == b) continue;
        EXPECT_TRUE(sockets[a][b].encrypts);
        EXPECT_EQ(sockets[a][b].send_key, sockets[b][a].receive_key);
        keys.push_back(sockets[a][b].send_key);
      }
    }
  }
  std::sort(keys.begin(), keys.end());
  EXPECT_EQ(keys.size(), 12u);
  EXPECT_EQ(std::unique(keys.begin(), keys.end()), keys.end());
}

TEST_F(Sealed, RanksOfWhichSomeEncryptAreRefused) {
  Meeting meeting(2);
  OnEachRank(2, [&](int rank) {
    const RankGroup group{"dp", RanksTo(2), rank};
    const auto other = [&, exchange = meeting.For(rank)](std::string mine) {
      if (rank == 1) mine[64] ^= 1;  // as a rank says that encrypts
      return exchange(mine);
    };
    EXPECT_EQ(ErrorOf(ConnectPeers(group, other, 5)),
              "axis dp: rank 1 encrypts (INTERLACE_ENCRYPT=1) and rank 0 does not; set it for all ranks or for none");
  });
}

TEST_F(Sealed, ARankWithoutASecretOrWhoseWordsAreChangedDoesNotEncrypt) {
  const Encrypting on;
  Meeting meeting(2);
  OnEachRank(2, [&](int rank) {
    const RankGroup group{"dp", RanksTo(2), rank};
    const auto changed = [&, exchange = meeting.For(rank), round = 0](std::string mine) mutable {
      if (rank == 1 && round++ == 1) mine[mine.size() - 8] ^= 1;  // of its random number
      return exchange(mine);
    };
    const std::string error = ErrorOf(ConnectPeers(group, changed, 0.5));
    const char* const wanted = rank == 1 ? "what rank 1 told the others came back changed" : "rank 1 did not connect";
    EXPECT_NE(error.find(wanted), std::string::npos) << error;
  });
  setenv("INTERLACE_ENCRYPT", "yes", 1);
  EXPECT_EQ(ErrorOf(ConnectPeers({"dp", RanksTo(2), 0}, {}, 1)), "INTERLACE_ENCRYPT is \"yes\"; it must be 1 or 0");
  setenv("INTERLACE_ENCRYPT", "1", 1);
  unsetenv("INTERLACE_MESH_KEY");
  EXPECT_EQ(ErrorOf(ConnectPeers({"dp", RanksTo(2), 0}, {}, 1)),
            "INTERLACE_ENCRYPT=1 needs the secret of the run; give every rank INTERLACE_SECRET_FILE");
}

// Two ranks whose data connections go through the test, from rank 0 to rank 1 and back.
struct Tapped {
  std::shared_ptr<Mesh> meshes[2];
  Socket wire[2], notes[2];  // the far ends
};

Tapped TappedRanks() {
  Tapped out;
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<PeerSockets> sockets(2);
    PeerSockets& peer = sockets[1 - rank];
    const std::pair<Socket*, Socket*> ends[] = {{&peer.data, &out.wire[rank]}, {&peer.control, &out.notes[rank]}};
    for (const auto& [near, far] : ends) {
      int pair[2];
      EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair), 0);
      *near = Socket(pair[0]);
      *far = Socket(pair[1]);
    }
    peer.send_key = std::string(32, static_cast<char>('a' + rank));
    peer.receive_key = std::string(32, static_cast<char>('b' - rank));
    peer.encrypts = true;
    out.meshes[rank] = std::make_shared<Mesh>(RankGroup{"dp", RanksTo(2), rank}, std::move(sockets),
                                              MeshOptions{.lost_patience_ms = 20, .silent_patience_ms = 20});
  }
  return out;
}

TypedSpan SpanOf(std::string& bytes) { return {bytes.data(), static_cast<int64_t>(bytes.size()), DType::kU8}; }

// What a rank sends for messages of these bytes.
std::string SentBy(const std::vector<std::string>& messages) {
  Tapped tapped = TappedRanks();
  Collectives group(tapped.meshes[0], 10);
  std::vector<std::string> copies = messages;
  std::vector<Ticket> open;
  for (std::string& bytes : copies)
    open.push_back(*group.StartSend(SpanOf(bytes), 1, "send %1", "a message"));
  std::string got;
  std::jthread reading([&] {
    size_t left = 0;
    for (const std::string& bytes : messages) left += bytes.size() + sizeof(WireHeader) + sizeof(FrameTag);
    std::vector<char> room(1 << 20);
    while (left > 0) {
      pollfd ready{tapped.wire[0].fd(), POLLIN, 0};
      poll(&ready, 1, -1);
      const ssize_t count = recv(tapped.wire[0].fd(), room.data(), std::min(left, room.size()), 0);
      if (count <= 0) continue;
      got.append(room.data(), static_cast<size_t>(count));
      left -= static_cast<size_t>(count);
    }
  });
  for (const Ticket ticket : open) EXPECT_TRUE(group.Wait(ticket).ok());
  reading.join();
  EXPECT_EQ(copies, messages);  // what is sent is only read
  return got;
}

// How a rank ends that receives these bytes for messages of so many; "": with what was sent.
std::string EndOf(const std::string& wire, const std::vector<std::string>& messages) {
  Tapped tapped = TappedRanks();
  std::jthread writing([&] {
    for (size_t at = 0; at < wire.size();) {
      const ssize_t count = send(tapped.wire[1].fd(), wire.data() + at, wire.size() - at, MSG_NOSIGNAL);
      if (count > 0) at += static_cast<size_t>(count);
      if (count < 0 && errno != EAGAIN) break;
      if (count < 0) std::this_thread::yield();
    }
    shutdown(tapped.wire[1].fd(), SHUT_WR);
  });
  std::string error;
  {
    Collectives group(tapped.meshes[1], 10);
    std::vector<std::string> memory;
    std::vector<Ticket> open;
    for (const std::string& bytes : messages) memory.emplace_back(bytes.size(), '-');
    for (std::string& bytes : memory)
      open.push_back(*group.StartRecv(SpanOf(bytes), 0, "recv %1", "a message"));
    for (size_t i = 0; i < open.size() && error.empty(); ++i) {
      const Status waited = group.Wait(open[i]);
      error = waited.ok() ? "" : waited.error().ToString();
      if (waited.ok() && memory[i] != messages[i]) error = "other bytes";
    }
  }
  tapped.meshes[1]->Leave();  // and no more is read
  return error;
}

std::vector<std::string> Messages(std::vector<size_t> sizes) {
  std::mt19937_64 random(7);
  std::vector<std::string> out;
  for (const size_t size : sizes) {
    std::string& text = out.emplace_back(size, 0);
    for (char& c : text) c = static_cast<char>(random());
  }
  return out;
}

TEST_F(Sealed, WhatIsOnTheWireHasNoRunOfThePayloadNorOfTheHeader) {
  const std::vector<std::string> messages = Messages({5'000, 1 << 20, 0, 333'333});
  const std::string wire = SentBy(messages);
  EXPECT_EQ(EndOf(wire, messages), "");
  std::vector<uint64_t> runs;  // of eight bytes that lie anywhere on the wire
  for (size_t at = 0; at + 8 <= wire.size(); ++at) {
    uint64_t run;
    std::memcpy(&run, wire.data() + at, sizeof run);
    runs.push_back(run);
  }
  std::sort(runs.begin(), runs.end());
  const auto found = [&](const std::string& bytes) {
    int count = 0;
    for (size_t at = 0; at + 8 <= bytes.size(); at += 8) {
      uint64_t run;
      std::memcpy(&run, bytes.data() + at, sizeof run);
      count += std::binary_search(runs.begin(), runs.end(), run);
    }
    return count;
  };
  for (const std::string& message : messages) EXPECT_EQ(found(message), 0);
  EXPECT_GT(found(wire), 0);  // the search finds what is there
  EXPECT_EQ(wire.find("a message"), std::string::npos);
  EXPECT_EQ(wire.find("ILMF"), std::string::npos);
}

TEST_F(Sealed, ABitThatFlipsAnywhereOnTheWireIsNoticed) {
  const std::vector<std::string> messages = Messages({40, 300'000});
  const std::string wire = SentBy(messages);
  const size_t first = sizeof(WireHeader) + 40 + sizeof(FrameTag);
  std::mt19937_64 random(11);
  std::vector<size_t> places;
  for (size_t at = 0; at < first + sizeof(WireHeader); at += 3) places.push_back(at);  // both headers, bytes, a tag
  for (int i = 0; i < 10; ++i) places.push_back(random() % wire.size());
  for (size_t at = wire.size() - sizeof(FrameTag); at < wire.size(); at += 5) places.push_back(at);
  for (const size_t at : places) {
    std::string changed = wire;
    changed[at] ^= static_cast<char>(1 << random() % 8);
    const std::string error = EndOf(changed, messages);
    const bool header = at < sizeof(WireHeader) || (at >= first && at < first + sizeof(WireHeader));
    EXPECT_NE(error.find(header ? "rank 0 started another operation" : "damaged on the way"), std::string::npos)
        << at << ": " << error;
  }
}

TEST_F(Sealed, FramesThatAreRepeatedExchangedOrLeftOutAreNoticed) {
  const std::vector<std::string> messages = Messages({100, 100, 100});
  const std::string wire = SentBy(messages);
  const size_t frame = wire.size() / 3;
  const std::string a = wire.substr(0, frame), b = wire.substr(frame, frame), c = wire.substr(2 * frame);
  EXPECT_EQ(EndOf(a + b + c, messages), "");
  for (const std::string& other : {a + a + c, b + a + c, a + c, a + c + b, a + b + b})
    EXPECT_NE(EndOf(other, messages).find("rank 0 started another operation"), std::string::npos);
  EXPECT_NE(EndOf(a + b, messages).find("rank 0 was lost"), std::string::npos);
}

// Many operations at once on sockets that take little at a time: what is encrypted lies in its buffer for long.
TEST_F(Sealed, RanksUnderstandOneAnother) {
  for (const int size : {2, 3}) {
    auto sockets = ConnectRanks("dp", RanksTo(size));
    for (int rank = 0; rank < size; ++rank) {
      for (int peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        sockets[rank][peer].send_key = std::string(32, static_cast<char>('a' + size * rank + peer));
        sockets[rank][peer].receive_key = std::string(32, static_cast<char>('a' + size * peer + rank));
        sockets[rank][peer].encrypts = true;
        const int small = 8 << 10;
        setsockopt(sockets[rank][peer].data.fd(), SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
      }
    }
    std::vector<std::shared_ptr<Mesh>> meshes;
    for (int rank = 0; rank < size; ++rank)
      meshes.push_back(std::make_shared<Mesh>(RankGroup{"dp", RanksTo(size), rank}, std::move(sockets[rank])));
    OnEachRank(size, [&](int rank) {
      Collectives group(meshes[rank], 60);
      std::vector<std::vector<char>> full;
      std::vector<Ticket> open;
      for (const int64_t bytes : {1 << 20, 1, 700'001, 0, 33, 2 << 20}) {
        std::vector<char>& memory = full.emplace_back(size * bytes);
        std::fill_n(memory.begin() + rank * bytes, bytes, static_cast<char>('x' + rank));
        const TypedSpan shard{memory.data() + rank * bytes, bytes, DType::kU8};
        open.push_back(*group.StartGather({shard}, {{memory.data(), size * bytes, DType::kU8}}, "gather u0"));
      }
      for (const Ticket ticket : open) EXPECT_TRUE(group.Wait(ticket).ok());
      for (const std::vector<char>& memory : full) {
        std::vector<char> wanted;
        for (int from = 0; from < size; ++from)
          wanted.insert(wanted.end(), memory.size() / size, static_cast<char>('x' + from));
        EXPECT_EQ(memory, wanted);
      }
    });
  }
}

}  // namespace
}  // namespace interlace
