#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <fstream>
#include <random>

#include "io/checksum.h"
#include "io/snapshot_writer.h"

namespace interlace {
namespace {

std::string Path(const std::string& name) {
  return testing::TempDir() + "/io_test_" + std::to_string(getpid()) + name;
}

std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Reference values of the xxHash specification's own test vectors and of the `xxhsum` tool.
TEST(Checksum, IsXxh64) {
  EXPECT_EQ(Checksum("", 0), 0xEF46DB3751D8E999u);
  EXPECT_EQ(Checksum("a", 1), 0xD24EC4F1A98C6E5Bu);
  EXPECT_EQ(Checksum("abc", 3), 0x44BC2CF5AD770999u);
  const std::string text = "Nobody inspects the spammish repetition";
  EXPECT_EQ(Checksum(text.data(), text.size()), 0xFBCEA83C8A378BF1u);
  for (size_t size = 0; size <= text.size(); ++size) {
    std::string copy(text.size(), '.');
    EXPECT_EQ(CopyAndChecksum(copy.data(), text.data(), size), Checksum(text.data(), size));
    EXPECT_EQ(copy, text.substr(0, size) + std::string(text.size() - size, '.'));
  }
}

TEST(Checksum, SeesEveryBit) {
  std::string data(77, 'x');
  const uint64_t before = Checksum(data.data(), data.size());
  for (size_t bit = 0; bit < data.size() * 8; ++bit) {
    data[bit / 8] ^= static_cast<char>(1 << bit % 8);
    EXPECT_NE(Checksum(data.data(), data.size()), before) << bit;
    data[bit / 8] ^= static_cast<char>(1 << bit % 8);
  }
}

// Pieces of odd sizes at odd places, written one by one and several at once, the owner overwriting its memory as soon
// as it may.
TEST(SnapshotWriter, WritesWhatWasThereWhenItBegan) {
  for (const auto& [staging, batch] :
       {std::pair<int64_t, int64_t>{0, 0}, {0, 150000}, {0, 2 << 20}, {100000, 150000}, {INT64_MAX, 0}}) {
    std::mt19937 random(7);
    const std::string path = Path("snapshot");
    const std::string head = "header";
    std::vector<std::string> memory;
    std::string expected = head;
    std::vector<Piece> pieces;
    for (int64_t size : {3, 5000, 200000, 1, 70000, 0, 4096, 131072, 65536, 12345}) {
      std::string& bytes = memory.emplace_back(static_cast<size_t>(size), '\0');
      for (char& c : bytes) c = static_cast<char>(random());
    }
    for (const std::string& bytes : memory) {
      pieces.push_back({bytes.data(), static_cast<int64_t>(bytes.size()), 0, static_cast<int64_t>(expected.size())});
      expected += bytes;
    }
    ASSERT_EQ(CreateFile(path, head, static_cast<int64_t>(expected.size())).code, 0);
    SnapshotWriter writer({path}, {.chunk_bytes = 65536, .batch_bytes = batch, .staging_bytes = staging});
    writer.Add(pieces);
    writer.Close();
    writer.WaitStaged();
    EXPECT_TRUE(writer.staged());
    for (std::string& bytes : memory) std::fill(bytes.begin(), bytes.end(), '!');
    ASSERT_EQ(writer.WaitDurable().code, 0);
    EXPECT_EQ(ReadAll(path), expected);
    int64_t covered = 0;
    for (const RangeSum& range : writer.sums()) {
      EXPECT_EQ(range.sum, Checksum(expected.data() + range.offset, static_cast<size_t>(range.bytes)));
      covered += range.bytes;
    }
    EXPECT_EQ(covered, static_cast<int64_t>(expected.size() - head.size()));
    const int64_t buffer = std::max<int64_t>(batch, 65536 + kBlock);
    EXPECT_LE(writer.stats().staging_peak_bytes, (staging == INT64_MAX ? covered : staging) + buffer);
    remove(path.c_str());
  }
}

// One buffer that is filled anew for each part: what was in it when it was added is written.
TEST(SnapshotWriter, TakesMemoryThatComesBitByBit) {
  for (const int64_t staging : {int64_t{0}, INT64_MAX}) {
    const std::string path = Path("bits");
    constexpr int64_t kPart = 100001;
    std::string expected;
    ASSERT_EQ(CreateFile(path, "", 9 * kPart).code, 0);
    SnapshotWriter writer({path}, {.chunk_bytes = 65536, .staging_bytes = staging});
    std::string memory(kPart, '\0');
    for (int part = 0; part < 9; ++part) {
      std::fill(memory.begin(), memory.end(), static_cast<char>('a' + part));
      writer.Add({{memory.data(), kPart, 0, part * kPart}});
      writer.WaitStaged();
      expected += memory;
    }
    EXPECT_TRUE(writer.staged());
    writer.Close();
    ASSERT_EQ(writer.WaitDurable().code, 0);
    EXPECT_EQ(ReadAll(path), expected);
    remove(path.c_str());
  }
}

TEST(SnapshotWriter, SaysWhatTheSystemRefused) {
  const std::string data(1 << 20, 'x');
  {
    SnapshotWriter writer({Path("missing")}, {});
    writer.Add({{data.data(), 1 << 20, 0, 0}});
    writer.WaitStaged();
    const FileFailure failure = writer.WaitDurable();
    EXPECT_EQ(failure.code, ENOENT);
    EXPECT_EQ(failure.path, Path("missing"));
  }
  SnapshotWriter full({"/dev/full"}, {.chunk_bytes = 65536});
  full.Add({{data.data(), 1 << 20, 0, 0}});
  full.Close();
  EXPECT_EQ(full.WaitDurable().code, ENOSPC);
}

TEST(SnapshotWriter, CanBeCancelled) {
  const std::string path = Path("cancelled");
  const std::string data(8 << 20, 'x');
  ASSERT_EQ(CreateFile(path, "", 8 << 20).code, 0);
  {
    SnapshotWriter writer({path}, {.chunk_bytes = 4096});
    writer.Add({{data.data(), 8 << 20, 0, 0}});
    writer.Cancel();
    writer.WaitStaged();
    EXPECT_EQ(writer.WaitDurable().code, ECANCELED);  // also while it waits for more
  }
  EXPECT_EQ(CreateFile(path, "", 1).code, EEXIST);
  remove(path.c_str());
}

}  // namespace
}  // namespace interlace
