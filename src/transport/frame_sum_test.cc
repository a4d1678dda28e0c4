#include "transport/frame_sum.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "transport/mesh_test_support.h"

namespace interlace {
namespace {

std::string Hex(const FrameTag& tag) {
  std::string out;
  for (const char c : tag) {
    out += "0123456789abcdef"[static_cast<unsigned char>(c) >> 4];
    out += "0123456789abcdef"[c & 15];
  }
  return out;
}

FrameTag TagOf(const std::string& key, uint64_t number, const std::string& text, size_t step = 1 << 20) {
  FrameSum sum(key, number);
  for (size_t at = 0; at < text.size(); at += step) sum.Add(text.data() + at, std::min(step, text.size() - at));
  return sum.Finish();
}

// By arithmetic on polynomials in Python: POLYVAL of the blocks and the length at a point, plus a pad, both halves of
// HMAC-SHA256(key, number).
TEST(FrameSum, TheTagIsThatOfPolyval) {
  const std::string key(32, 'k');
  EXPECT_EQ(Hex(TagOf(key, 0, "")), "49ec7e820950a62b400268497b859d63");
  EXPECT_EQ(Hex(TagOf(key, 1, "Cryptographic Forum Research Group")), "00c536182bc3c039cc4f1e2367d359b0");
  EXPECT_EQ(Hex(TagOf(key, 2, std::string(1000, '\xff'))), "2a15279c8b7829357f9269f01885f803");
}

TEST(FrameSum, PiecesMakeNoDifferenceAndBitsDo) {
  std::mt19937_64 random(9);
  for (const std::string& key : {std::string(), std::string(32, 'k')}) {
    std::string text(777, 'x');
    for (char& c : text) c = static_cast<char>(random());
    const FrameTag tag = TagOf(key, 4, text);
    for (const size_t step : {1, 3, 16, 100}) EXPECT_EQ(TagOf(key, 4, text, step), tag);
    for (int i = 0; i < 200; ++i) {
      std::string other = text;
      other[random() % other.size()] ^= static_cast<char>(1 << random() % 8);
      EXPECT_NE(TagOf(key, 4, other), tag);
    }
    EXPECT_EQ(TagOf(key, 5, text) == tag, key.empty());  // a tag of another frame is none
  }
  EXPECT_NE(TagOf(std::string(32, 'k'), 4, "x"), TagOf(std::string(32, 'l'), 4, "x"));
  EXPECT_NE(TagOf(std::string(32, 'k'), 4, "x"), TagOf(std::string(32, 'k'), 4, std::string("x\0", 2)));
}

TEST(FrameSum, RanksWithKeysUnderstandOneAnother) {
  auto sockets = ConnectRanks("dp", RanksTo(2));
  sockets[0][1].send_key = sockets[1][0].receive_key = std::string(32, 'a');
  sockets[1][0].send_key = sockets[0][1].receive_key = std::string(32, 'b');
  std::vector<std::shared_ptr<Mesh>> meshes;
  for (int rank = 0; rank < 2; ++rank)
    meshes.push_back(std::make_shared<Mesh>(RankGroup{"dp", RanksTo(2), rank}, std::move(sockets[rank])));
  OnEachRank(2, [&](int rank) {
    Collectives group(meshes[rank], 60);
    std::vector<char> full(2 << 20, static_cast<char>('x' + rank));
    const TypedSpan shard{full.data() + (rank << 20), 1 << 20, DType::kU8};
    const Ticket ticket = *group.StartGather({shard}, {{full.data(), 2 << 20, DType::kU8}}, "gather u0");
    EXPECT_TRUE(group.Wait(ticket).ok());
    EXPECT_EQ(full, [] {
      std::vector<char> both(2 << 20, 'x');
      std::fill(both.begin() + (1 << 20), both.end(), 'y');
      return both;
    }());
  });
}

}  // namespace
}  // namespace interlace
