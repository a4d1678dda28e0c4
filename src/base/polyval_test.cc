#include "base/polyval.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace interlace {
namespace {

Block128 Bytes(const std::string& hex) {
  unsigned char bytes[16];
  for (size_t i = 0; i < 16; ++i) bytes[i] = static_cast<unsigned char>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  Block128 block;
  std::memcpy(block.data(), bytes, sizeof block);
  return block;
}

const Polyval::By kAll[] = {Polyval::By::kAny, Polyval::By::kNarrow, Polyval::By::kNone};

TEST(Polyval, TheExampleOfItsStandard) {  // RFC 8452, appendix A
  for (const auto by : kAll) {
    Polyval::Use(by);
    Polyval sum(Bytes("25629347589242761d31f826ba4b757b"));
    sum.Add(Bytes("4f4f95668c83dfb6401762bb2d01a262").data(), 1);
    sum.Add(Bytes("d1a24ddd2721d006bbe45f20d3c9f362").data(), 1);
    EXPECT_EQ(sum.value(), Bytes("f7a3b47b846119fae5b7866cf5e5b77e"));
  }
  Polyval::Use(Polyval::By::kAny);
}

TEST(Polyval, AllWaysAndAllStretchesAgree) {
  std::mt19937_64 random(5);
  std::vector<Block128> blocks(100);
  for (Block128& block : blocks) block = {random(), random()};
  const Block128 key = {random(), random()};
  Polyval::Use(Polyval::By::kNone);
  Polyval plain(key);
  plain.Add(blocks.data(), blocks.size());
  for (const auto by : kAll) {
    Polyval::Use(by);
    for (const size_t step : {1, 15, 16, 17, 33, 100}) {
      Polyval sum(key);
      for (size_t at = 0; at < blocks.size(); at += step) sum.Add(&blocks[at], std::min(step, blocks.size() - at));
      EXPECT_EQ(sum.value(), plain.value()) << step;
    }
  }
  Polyval::Use(Polyval::By::kAny);
}

}  // namespace
}  // namespace interlace
