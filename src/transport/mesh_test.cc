// What a mesh does when its peers misbehave: the test writes their bytes itself.
#include "transport/mesh.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <cstring>
#include <random>

#include "transport/collectives.h"
#include "transport/mesh_test_support.h"
#include "transport/testing/wire.h"

namespace interlace {
namespace {

constexpr MeshOptions kImpatient{.lost_patience_ms = 20, .silent_patience_ms = 20};
constexpr double kLong = 60, kShort = 0.02;

// Rank 0 as it is, and the ends of its connections in the hands of the test.
struct Wired {
  std::shared_ptr<Mesh> mesh;
  std::vector<PeerSockets> peers;  // by rank: the far ends
};

Wired WiredMesh(int size) {
  std::vector<std::vector<PeerSockets>> sockets = ConnectRanks("dp", RanksTo(size));
  Wired out;
  out.mesh = std::make_shared<Mesh>(RankGroup{"dp", RanksTo(size), 0}, std::move(sockets[0]), kImpatient);
  out.peers.resize(size);
  for (int rank = 1; rank < size; ++rank) out.peers[rank] = std::move(sockets[rank][0]);
  return out;
}

void Say(const Socket& socket, const std::string& bytes) {
  for (size_t sent = 0; sent < bytes.size();) {
    pollfd ready{socket.fd(), POLLOUT, 0};
    poll(&ready, 1, -1);
    const ssize_t n = send(socket.fd(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n > 0) sent += static_cast<size_t>(n);
    if (n < 0 && errno != EAGAIN) return;
  }
}

// A close that the other side sees as a reset.
void Reset(PeerSockets& peer) {
  const linger now{1, 0};
  setsockopt(peer.data.fd(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
  setsockopt(peer.control.fd(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
  peer = {};
}

// A gather of 4 bytes a rank, and what came of it.
struct Gather {
  char own[4] = {'o', 'w', 'n', '.'}, full[16] = {};
  std::string Run(Mesh& mesh, double timeout_s) {
    Collectives group(std::shared_ptr<Mesh>(&mesh, [](Mesh*) {}), timeout_s);
    const Result<Ticket> ticket =
        group.StartGather({{own, 4, DType::kU8}}, {{full, 4 * mesh.group().size(), DType::kU8}}, "gather u0");
    return ticket.ok() ? ErrorOf(group.Wait(*ticket)) : ErrorOf(ticket);
  }
};

void ExpectHas(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(Mesh, ShortWritesArriveWhole) {
  Wired wired = WiredMesh(2);
  const std::string frame = FrameOf(0, 0, "gather u0", "peer");
  std::jthread slow([&] {
    std::mt19937 random(3);
    for (size_t at = 0; at < frame.size();) {
      const size_t bytes = std::min<size_t>(1 + random() % 3, frame.size() - at);
      Say(wired.peers[1].data, frame.substr(at, bytes));
      at += bytes;
      std::this_thread::yield();
    }
  });
  Gather gather;
  EXPECT_EQ(gather.Run(*wired.mesh, kLong), "no error");
  EXPECT_EQ(std::string(gather.full, 8), "own.peer");
}

TEST(Mesh, AResetNamesRankAndOperation) {
  for (const size_t before : {0, 30, 66, 75}) {
    Wired wired = WiredMesh(2);
    Say(wired.peers[1].data, FrameOf(0, 0, "gather u0", "peer").substr(0, before));
    Reset(wired.peers[1]);
    const std::string text = Gather().Run(*wired.mesh, kLong);
    ExpectHas(text, "gather u0 on axis dp: rank 1 was lost after ");
    ExpectHas(text, "restart all ranks from the last checkpoint");
    EXPECT_EQ(Gather().Run(*wired.mesh, kLong), text);  // and from then on
  }
}

TEST(Mesh, AHalfOpenConnectionIsALostRank) {
  Wired wired = WiredMesh(2);
  Say(wired.peers[1].data, FrameOf(0, 0, "gather u0", "peer").substr(0, 65));
  shutdown(wired.peers[1].data.fd(), SHUT_WR);  // it still reads, and its other connection lives
  ExpectHas(Gather().Run(*wired.mesh, kLong), "gather u0 on axis dp: rank 1 was lost after ");
}

TEST(Mesh, AStallEndsAtTheDeadline) {
  for (const size_t before : {0, 10, 67}) {
    Wired wired = WiredMesh(2);
    Say(wired.peers[1].data, FrameOf(0, 0, "gather u0", "peer").substr(0, before));
    ExpectHas(Gather().Run(*wired.mesh, kShort), "gather u0 on axis dp: rank 1 did not answer for ");
  }
}

TEST(Mesh, APeerThatTakesNothingEndsAtTheDeadline) {
  Wired wired = WiredMesh(2);
  std::vector<char> large(size_t{32} << 20);
  Collectives group(wired.mesh, kShort);
  const Ticket ticket = *group.StartSend({large.data(), static_cast<int64_t>(large.size()), DType::kU8}, 1, "send %5");
  ExpectHas(ErrorOf(group.Wait(ticket)), "send %5 on axis dp: rank 1 did not answer for ");
}

TEST(Mesh, GarbageIsAnotherOperation) {
  std::mt19937_64 random(11);
  for (int i = 0; i < 12; ++i) {
    Wired wired = WiredMesh(2);
    std::string frame = FrameOf(0, 0, "gather u0", "peer");
    if (i == 0) {
      for (char& c : frame) c = static_cast<char>(random());
    } else {  // one bit of the header
      frame[random() % sizeof(WireHeader)] ^= static_cast<char>(1 << random() % 8);
    }
    Say(wired.peers[1].data, frame);
    Gather gather;
    ExpectHas(gather.Run(*wired.mesh, kLong), "gather u0 on axis dp: rank 1 started another operation: as number 0");
  }
}

TEST(Mesh, ABitThatFlipsOnTheWayIsNoticed) {
  const std::string whole = FrameOf(0, 0, "gather u0", "peer");
  for (size_t at = sizeof(WireHeader); at < whole.size(); ++at) {  // of the bytes or of their checksum
    Wired wired = WiredMesh(2);
    std::string frame = whole;
    frame[at] ^= static_cast<char>(1 << at % 8);
    Say(wired.peers[1].data, frame);
    ExpectHas(Gather().Run(*wired.mesh, kLong),
              "gather u0 on axis dp: what rank 1 sent was damaged on the way: the checksum of message 0 of 4 bytes is "
              "wrong, and nothing of it was used");
  }
}

TEST(Mesh, AFrameWithoutTheTagOfItsKeyIsNotTaken) {
  std::vector<std::vector<PeerSockets>> sockets = ConnectRanks("dp", RanksTo(2));
  sockets[0][1].receive_key = std::string(32, 'k');
  Mesh mesh(RankGroup{"dp", RanksTo(2), 0}, std::move(sockets[0]), kImpatient);
  Say(sockets[1][0].data, FrameOf(0, 0, "gather u0", "peer"));
  ExpectHas(Gather().Run(mesh, kLong), "what rank 1 sent was damaged on the way");
}

TEST(Mesh, AFrameOfTheWrongSizeIsNotRead) {
  Wired wired = WiredMesh(2);
  WireHeader header;
  header.bytes = uint64_t{1} << 62;
  std::memcpy(header.tag, "gather \xff\n", 9);
  Say(wired.peers[1].data, std::string(reinterpret_cast<const char*>(&header), sizeof header) + std::string(4096, 'x'));
  Gather gather;
  ExpectHas(gather.Run(*wired.mesh, kLong),
            "rank 1 started another operation: as number 0 it sends 4611686018427387904 bytes of \"gather ??\" (number "
            "0), this rank expects 4;");
  EXPECT_EQ(std::string(gather.full + 8, 8), std::string(8, '\0'));  // nothing behind what was expected
}

TEST(Mesh, GarbageAmongTheNotesStopsNothingWrong) {
  for (const size_t bytes : {1, 100, 192, 1000}) {
    Wired wired = WiredMesh(2);
    Say(wired.peers[1].control, std::string(bytes, '\xee'));
    Say(wired.peers[1].data, FrameOf(0, 0, "gather u0", "peer"));
    Gather gather;
    const std::string text = gather.Run(*wired.mesh, kShort);
    if (text == "no error") {
      EXPECT_EQ(std::string(gather.full, 8), "own.peer");
    } else {
      ExpectHas(text, "gather u0 on axis dp: ");
    }
  }
}

TEST(Mesh, ADamagedNoteIsNotBelieved) {
  Note note(Note::kTimedOut, {0}, "gather u0", 3);
  note.sum = note.Sum();
  const std::string whole(reinterpret_cast<const char*>(&note), sizeof note);
  for (size_t at = 0; at <= whole.size(); at += 7) {
    Wired wired = WiredMesh(2);
    std::string bytes = whole;
    if (at < whole.size()) bytes[at] ^= static_cast<char>(1 << at % 8);
    Say(wired.peers[1].control, bytes);
    ExpectHas(Gather().Run(*wired.mesh, kLong), at < whole.size() ? "what rank 1 sent was damaged on the way;"
                                                                  : "rank 1 stopped waiting for this rank (0) after 3.00 s");
  }
}

// Over TCP and through memory.
class MeshOfRanks : public testing::TestWithParam<bool> {
 public:
  static std::vector<std::shared_ptr<Mesh>> Make(const std::vector<int64_t>& ranks, MeshOptions options = {}) {
    return MeshesOf("dp", ranks, options, GetParam());
  }
};
INSTANTIATE_TEST_SUITE_P(Mesh, MeshOfRanks, testing::Bool(), [](const auto& info) {
  return info.param ? "Memory" : "Tcp";
});

TEST_P(MeshOfRanks, ARankThatLeftIsTold) {
  const auto meshes = Make({4, 6}, kImpatient);
  meshes[1]->Leave();
  ExpectHas(Gather().Run(*meshes[0], kLong), "gather u0 on axis dp: rank 6 (1 on axis dp) was lost after ");
  EXPECT_EQ(Gather().Run(*meshes[1], kLong), "this rank has left axis dp; compile again to go on");
}

TEST_P(MeshOfRanks, RanksThatDifferAreTold) {
  const auto meshes = Make(RanksTo(2));
  std::vector<std::string> texts(2);
  OnEachRank(2, [&](int rank) {
    Collectives group(meshes[rank], kLong);
    char value[8] = {}, receive[64];
    const TypedSpan buffer{value, 8, DType::kU8};
    const Ticket ticket =
        rank == 0 ? *group.StartAllReduce(buffer, receive, "norm") : *group.StartBroadcast(buffer, 1, "loss");
    texts[rank] = ErrorOf(group.Wait(ticket));
  });
  ExpectHas(texts[0], "norm on axis dp: rank 1 started another operation: as number 0 it sends 8 bytes of \"loss\"");
}

// Rank 2 of three never begins. The others wait for it directly, and for one another behind it.
TEST_P(MeshOfRanks, TheSilentRankIsNamedAndNotThoseThatWaitForIt) {
  const auto meshes = Make(RanksTo(3), {.lost_patience_ms = 500, .silent_patience_ms = 500});
  OnEachRank(2, [&](int rank) {
    Collectives group(meshes[rank], 0.1);
    std::vector<char> value(1 << 17), receive(1 << 18);
    const TypedSpan large{value.data(), 1 << 17, DType::kU8};
    (void)*group.StartAllReduce(large, receive.data(), "all-reduce %1");  // in two rounds
    char word[3] = {};
    const Ticket behind = *group.StartGather({{word + rank, 1, DType::kU8}}, {{word, 3, DType::kU8}}, "gather u1");
    const std::string text = ErrorOf(group.Wait(behind));
    ExpectHas(text, "gather u1 on axis dp: rank 2 did not answer for ");
  });
}

TEST(Mesh, ALossBetweenTheRoundsIsNamed) {
  Wired wired = WiredMesh(3);
  std::vector<char> value(96 << 10), receive(Collectives::AllReduceReceiveBytes(3, {nullptr, 96 << 10, DType::kU8}));
  Collectives group(wired.mesh, kLong);
  const Ticket ticket = *group.StartAllReduce({value.data(), 96 << 10, DType::kU8}, receive.data(), "all-reduce %1");
  const std::string part(32 << 10, '\1');
  Say(wired.peers[1].data, FrameOf(2, 0, "all-reduce %1", part));
  Say(wired.peers[1].data, FrameOf(2, 1, "all-reduce %1", part));
  Say(wired.peers[2].data, FrameOf(2, 0, "all-reduce %1", part));
  Reset(wired.peers[2]);
  ExpectHas(ErrorOf(group.Wait(ticket)), "all-reduce %1 on axis dp: rank 2 was lost after ");
}

TEST(Mesh, RandomWiresNeverCrash) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 150; ++i) {
    std::vector<uint8_t> input(random() % 120);
    for (uint8_t& byte : input) byte = static_cast<uint8_t>(random() % (i % 2 == 0 ? 256 : 8));
    RunWire(input.data(), input.size());
  }
}

TEST(Connect, ARankThatCannotListenIsToldToAll) {
  Meeting meeting(2);
  OnEachRank(2, [&](int rank) {
    const RankGroup group{"dp", RanksTo(2), rank};
    ExchangeBytes exchange = meeting.For(rank);
    const auto spoiled = [&, round = 0](const std::string& mine) mutable {
      return exchange(rank == 0 && round++ == 1 ? std::string(mine.size(), '\0') : mine);  // as if it had no address
    };
    const std::string text = ErrorOf(ConnectPeers(group, spoiled, 5));
    EXPECT_EQ(text, "axis dp: rank 0 has no address for its peers (its own error says why)");
  });
}

TEST(Connect, BytesOfAnotherReleaseAreRefused) {
  const auto strange = [](const std::string& mine) -> Result<std::vector<std::string>> {
    return std::vector<std::string>{mine, mine + "more"};
  };
  EXPECT_EQ(ErrorOf(ConnectPeers({"dp", RanksTo(2), 0}, strange, 5)),
            "axis dp: rank 1 did not tell where it is; do all ranks run the same release?");
}

TEST(Notes, TheCulpritIsWhoSaysNothing) {
  const auto waits = [](std::vector<int> ranks) { return Note(Note::kTimedOut, ranks, "gather u0", 2); };
  std::vector<Witness> peers(3);
  peers[1].note = waits({2});
  const Verdict verdict = Judge(0, waits({1, 2}), peers);
  EXPECT_EQ(verdict.note.kind, Note::kTimedOut);
  EXPECT_EQ(std::vector<int32_t>(verdict.note.ranks, verdict.note.ranks + verdict.note.count), std::vector<int32_t>{2});
  EXPECT_EQ(Explain(verdict, {"dp", {4, 5, 6}, 0}, "gather u0"),
            "gather u0 on axis dp: rank 6 (2 on axis dp) did not answer for 2.00 s (timed out: stuck, or slower than "
            "the timeout)");
  peers[2].closed = peers[2].broken = true;
  EXPECT_EQ(Judge(0, waits({1, 2}), peers).note.kind, Note::kLost);
}

// Nothing comes from rank 1 to rank 0. Rank 0 notices first; what the others wait for is behind that.
TEST(Notes, OfAStuckConnectionItsEndsAreNamed) {
  const auto waits = [](std::vector<int> ranks, double seconds) { return Note(Note::kTimedOut, ranks, "gather u0", seconds); };
  const Note notes[] = {waits({1}, 2), waits({0, 2}, 1.5), waits({0, 1}, 1.5)};
  const char* texts[] = {"rank 1 stopped waiting for this rank (0) after 2.00 s in gather u0",
                         "rank 0 stopped waiting for this rank (1) after 2.00 s in gather u0",
                         ("rank 1 did not answer for 2.00 s (timed out: stuck, or slower than the timeout), reported by rank "
                          "0 in gather u0")};
  for (int rank = 0; rank < 3; ++rank) {
    std::vector<Witness> peers(3);
    for (int peer = 0; peer < 3; ++peer) {
      if (peer != rank) peers[peer].note = notes[peer];
    }
    const RankGroup group{"dp", RanksTo(3), rank};
    ExpectHas(Explain(Judge(rank, notes[rank], peers), group, "gather u1"), texts[rank]);
  }
}

}  // namespace
}  // namespace interlace
