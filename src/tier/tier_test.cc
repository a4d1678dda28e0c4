#include "tier/tier.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>

#include "tier/file_worker.h"
#include "tier/host_lane.h"
#include "tier/page_heap.h"

namespace interlace {
namespace {

namespace fs = std::filesystem;

// A folder of the test's own, empty.
std::string FolderOf(const std::string& name) {
  const std::string folder = testing::TempDir() + "/tier_test_" + std::to_string(getpid()) + "_" + name;
  fs::remove_all(folder);
  fs::create_directories(folder);
  return folder;
}

std::unique_ptr<Tier> TierAt(const std::string& folder, int64_t rank = 0, int64_t ranks = 1) {
  Result<std::unique_ptr<Tier>> tier = MakeFileTier({.folder = folder, .rank = rank, .ranks = ranks});
  EXPECT_EQ(ErrorOf(tier), "no error");
  return std::move(*tier);
}

std::string DataFile(const std::string& folder, int rank = 0) {
  return folder + "/interlace-tier-" + std::to_string(rank) + ".data";
}

// Random regions, written and read in random order with many under way, against a copy in memory.
void RunRandomTransfers(Tier& tier, uint64_t seed) {
  std::mt19937_64 random(seed);
  struct Region {
    Tier::Region id;
    std::string content;  // what was written last; zeros before
    bool busy = false;
  };
  struct UnderWay {
    Tier::Ticket ticket;
    size_t region;
    bool write;
    std::unique_ptr<char, decltype(&std::free)> memory;
  };
  std::vector<Region> regions;
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{4095}, size_t{4096}, size_t{70'000},
                             static_cast<size_t>(kTierBlock), static_cast<size_t>(2 * kTierBlock + 17)}) {
    const Result<Tier::Region> region = tier.Reserve("r" + std::to_string(bytes), static_cast<int64_t>(bytes));
    ASSERT_EQ(ErrorOf(region), "no error");
    regions.push_back({*region, std::string(bytes, '\0')});
    EXPECT_EQ(*tier.Reserve("r" + std::to_string(bytes), static_cast<int64_t>(bytes)), *region);  // the same again
  }
  std::vector<UnderWay> open;
  int64_t out = 0, in = 0;
  const auto finish_one = [&] {
    const size_t which = random() % open.size();
    UnderWay& one = open[which];
    Region& region = regions[one.region];
    ASSERT_EQ(ErrorOf(tier.Wait(one.ticket)), "no error");
    const bool same = one.write || std::memcmp(one.memory.get(), region.content.data(), region.content.size()) == 0;
    ASSERT_TRUE(same) << "region " << one.region;
    (one.write ? out : in) += static_cast<int64_t>(region.content.size());
    region.busy = false;
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(which));
  };
  for (int i = 0; i < 120; ++i) {
    const size_t which = random() % regions.size();
    Region& region = regions[which];
    if (!region.busy) {
      const size_t bytes = region.content.size();
      // At a page's begin, from and to where it lies; elsewhere through the worker's buffer.
      const size_t shift = random() % 2 == 0 ? 0 : 8;
      auto* const room = static_cast<char*>(std::aligned_alloc(4096, (bytes + 8 + 4095) / 4096 * 4096));
      UnderWay one{0, which, random() % 2 == 0, {room, &std::free}};
      char* const memory = room + shift;
      if (one.write) {
        std::memset(memory, static_cast<int>(random() % 256), bytes);
        for (size_t at = 0; at < bytes; at += 61) memory[at] = static_cast<char>(random());
        region.content.assign(memory, bytes);
        one.ticket = tier.StartWrite(region.id, memory, static_cast<int64_t>(bytes));
      } else if (shift == 0) {
        one.ticket = tier.StartRead(region.id, memory, static_cast<int64_t>(bytes));
      } else {
        continue;
      }
      region.busy = true;
      open.push_back(std::move(one));
    }
    while (open.size() > random() % 5) finish_one();
  }
  while (!open.empty()) finish_one();
  EXPECT_EQ(tier.stats().bytes_out, out);
  EXPECT_EQ(tier.stats().bytes_in, in);
}

TEST(Tier, RandomTransfersGiveBackWhatWasWritten) {
  for (uint64_t seed = 0; seed < 3; ++seed) {
    RunRandomTransfers(*MakeHostTier(), seed);
    const std::string folder = FolderOf("random");
    const auto tier = TierAt(folder);
    RunRandomTransfers(*tier, seed);
    EXPECT_EQ(tier->Memory(0), nullptr);
  }
}

TEST(Tier, HostMemoryCanBeWorkedOnWhereItLies) {
  const auto tier = MakeHostTier();
  const Tier::Region region = *tier->Reserve("u0.exp_avg", 4);
  EXPECT_EQ(ErrorOf(tier->Wait(tier->StartWrite(region, "abcd", 4))), "no error");
  static_cast<char*>(tier->Memory(region))[1] = 'X';
  char back[4];
  EXPECT_EQ(ErrorOf(tier->Wait(tier->StartRead(region, back, 4))), "no error");
  EXPECT_EQ(std::string(back, 4), "aXcd");
  EXPECT_NE(ErrorOf(tier->Reserve("all", int64_t{1} << 60)).find("the host has no memory for all"), std::string::npos);
}

TEST(Tier, DamageIsToldWithItsPlace) {
  const std::string folder = FolderOf("damage");
  const auto tier = TierAt(folder);
  const int64_t bytes = kTierBlock + 10'000;
  const std::string content(bytes, 'x');
  const Tier::Region first = *tier->Reserve("u0.w", 5000), region = *tier->Reserve("u1.w", bytes);
  ASSERT_EQ(ErrorOf(tier->Wait(tier->StartWrite(first, content.data(), 5000))), "no error");
  ASSERT_EQ(ErrorOf(tier->Wait(tier->StartWrite(region, content.data(), bytes))), "no error");
  std::string back(bytes, '\0');
  {
    std::fstream file(DataFile(folder), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(8192 + kTierBlock + 123).put('y');
  }
  const std::string text = ErrorOf(tier->Wait(tier->StartRead(region, back.data(), bytes)));
  EXPECT_NE(text.find(DataFile(folder) + " gives other bytes than were written, between 1056768 and 1066768 (u1.w; "),
            std::string::npos)
      << text;
  EXPECT_EQ(ErrorOf(tier->Wait(tier->StartRead(first, back.data(), 5000))), "no error");
  fs::resize_file(DataFile(folder), 8192 + 4096);
  EXPECT_NE(ErrorOf(tier->Wait(tier->StartRead(region, back.data(), bytes))).find(" ends at byte 12288, within u1.w: "),
            std::string::npos);
  // What is written again is sound again.
  ASSERT_EQ(ErrorOf(tier->Wait(tier->StartWrite(region, content.data(), bytes))), "no error");
  ASSERT_EQ(ErrorOf(tier->Wait(tier->StartRead(region, back.data(), bytes))), "no error");
  EXPECT_EQ(back, content);
}

TEST(Tier, NoRoomIsFoundWhenItIsReserved) {
  const std::string folder = FolderOf("full");
  const auto tier = TierAt(folder);
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{}, least{1 << 20, 0};
  getrlimit(RLIMIT_FSIZE, &before);
  least.rlim_max = before.rlim_max;
  setrlimit(RLIMIT_FSIZE, &least);
  const std::string text = ErrorOf(tier->Reserve("u0.w", 2 << 20));
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_NE(text.find("the tier folder '" + folder + "' has no room for u0.w (2097152 bytes after 0 reserved"),
            std::string::npos)
      << text;
  EXPECT_NE(ErrorOf(tier->Reserve("u0.w", int64_t{1} << 61)).find("more than a tier can hold"), std::string::npos);
}

TEST(Tier, AFolderIsOneRunsAlone) {
  const std::string folder = FolderOf("locked");
  auto tier = TierAt(folder);
  EXPECT_EQ(ErrorOf(MakeFileTier({.folder = folder})),
            "the tier folder '" + folder + "' is in use by another run (process " + std::to_string(getpid()) +
                "); give each run a folder of its own");
  tier.reset();
  EXPECT_FALSE(fs::exists(DataFile(folder)));
  fs::create_symlink("/nowhere/at/all", DataFile(folder));
  EXPECT_NE(ErrorOf(MakeFileTier({.folder = folder})).find("it is a link"), std::string::npos);
  EXPECT_NE(ErrorOf(MakeFileTier({.folder = folder + "/none"})).find("make it first, on a fast local disk"),
            std::string::npos);
  std::ofstream(folder + "/file") << "x";
  EXPECT_EQ(ErrorOf(MakeFileTier({.folder = folder + "/file"})), "the tier '" + folder + "/file' is not a folder");
}

TEST(Tier, WhatAKilledRunLeftIsRemovedAndNothingElse) {
  const std::string folder = FolderOf("left");
  const auto leave = [&](const std::string& rank, const std::string& note) {
    std::ofstream(folder + "/interlace-tier-" + rank + ".lock") << note;
    std::ofstream(folder + "/interlace-tier-" + rank + ".data") << "data";
  };
  leave("3", "process 12345");
  leave("07", "process 12345");
  leave("5", "somebody else's");
  std::ofstream(folder + "/interlace-tier-9.data") << "data";
  const auto tier = TierAt(folder, 0, 2);
  EXPECT_FALSE(fs::exists(DataFile(folder, 3)));
  EXPECT_TRUE(fs::exists(folder + "/interlace-tier-07.data"));
  EXPECT_TRUE(fs::exists(DataFile(folder, 5)));
  EXPECT_TRUE(fs::exists(DataFile(folder, 9)));
}

TEST(PageHeap, BlocksNeverOverlapAndGapsBecomeOne) {
  PageHeap heap;
  std::mt19937_64 random(2);
  struct Block {
    char* memory;
    size_t bytes;
    char mark;
  };
  std::vector<Block> blocks;
  size_t live = 0, most = 0;
  const auto give = [&](size_t which) {
    const Block block = blocks[which];
    for (const size_t at : {size_t{0}, block.bytes / 2, block.bytes - 1}) ASSERT_EQ(block.memory[at], block.mark);
    EXPECT_TRUE(heap.Holds(block.memory));
    EXPECT_EQ(heap.Give(block.memory, random() % 2 == 0), PageHeap::Rounded(static_cast<int64_t>(block.bytes)));
    EXPECT_FALSE(heap.Holds(block.memory));
    live -= PageHeap::Rounded(static_cast<int64_t>(block.bytes));
    blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(which));
  };
  for (int i = 0; i < 2000; ++i) {
    if (random() % 2 == 0 || blocks.empty()) {
      const size_t bytes = 1 + random() % 300'000;
      char* const memory = heap.Take(static_cast<int64_t>(bytes));
      ASSERT_NE(memory, nullptr);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % PageHeap::kPage, 0u);
      const char mark = static_cast<char>(random());
      memory[0] = memory[bytes / 2] = memory[bytes - 1] = mark;
      blocks.push_back({memory, bytes, mark});
      live += PageHeap::Rounded(static_cast<int64_t>(bytes));
      most = std::max(most, live);
    } else {
      give(random() % blocks.size());
    }
  }
  while (!blocks.empty()) give(blocks.size() - 1);
  const int64_t used = heap.Bytes();
  EXPECT_GE(used, static_cast<int64_t>(most));
  char* const whole = heap.Take(used);  // all gaps are one again
  EXPECT_EQ(heap.Bytes(), used);
  heap.Give(whole, true);
}

TEST(HostLane, JobsRunInOrderAndStopAtTheFirstThatFails) {
  HostLane lane;
  std::string ran;
  for (const char job : {'a', 'b', 'c', 'd'}) {
    lane.Start([&ran, job]() -> Status {
      ran += job;
      return job == 'c' ? Status(MakeError("no state")) : Status(Ok{});
    });
  }
  EXPECT_EQ(ErrorOf(lane.Wait(2)), "no error");
  EXPECT_EQ(ErrorOf(lane.Wait(3)), "an optimizer step on the host failed: no state");
  EXPECT_EQ(ErrorOf(lane.WaitAll()), "an optimizer step on the host failed: no state");
  EXPECT_EQ(ran, "abc");
}

}  // namespace
}  // namespace interlace
