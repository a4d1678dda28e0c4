#include "io/checksum.h"

#include <bit>
#include <cstring>

namespace interlace {

namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                   kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;
static_assert(std::endian::native == std::endian::little, "XXH64 reads little-endian words");

template <typename T>
uint64_t Read(const unsigned char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

uint64_t Round(uint64_t lane, uint64_t input) {
  return std::rotl(lane + input * kPrime2, 31) * kPrime1;
}

uint64_t Merge(uint64_t hash, uint64_t lane) {
  return (hash ^ Round(0, lane)) * kPrime1 + kPrime4;
}

// With kCopy, what is read is stored at `to` as well: the bytes pass through the registers anyway, so the copy costs no
// second pass over them.
template <bool kCopy>
uint64_t Hash(const unsigned char* at, size_t size, uint64_t seed, [[maybe_unused]] unsigned char* to) {
  const unsigned char* const begin = at;
  const unsigned char* const end = at + size;
  uint64_t hash = seed + kPrime5;
  if (size >= 32) {
    uint64_t a = seed + kPrime1 + kPrime2, b = seed + kPrime2, c = seed, d = seed - kPrime1;
    for (; end - at >= 32; at += 32) {
      const uint64_t words[4] = {Read<uint64_t>(at), Read<uint64_t>(at + 8), Read<uint64_t>(at + 16),
                                 Read<uint64_t>(at + 24)};
      if constexpr (kCopy) std::memcpy(to + (at - begin), words, sizeof words);
      a = Round(a, words[0]), b = Round(b, words[1]), c = Round(c, words[2]), d = Round(d, words[3]);
    }
    hash = std::rotl(a, 1) + std::rotl(b, 7) + std::rotl(c, 12) + std::rotl(d, 18);
    for (uint64_t lane : {a, b, c, d}) hash = Merge(hash, lane);
  }
  if constexpr (kCopy) std::memcpy(to + (at - begin), at, static_cast<size_t>(end - at));
  hash += size;
  for (; end - at >= 8; at += 8) hash = std::rotl(hash ^ Round(0, Read<uint64_t>(at)), 27) * kPrime1 + kPrime4;
  for (; end - at >= 4; at += 4) hash = std::rotl(hash ^ (Read<uint32_t>(at) * kPrime1), 23) * kPrime2 + kPrime3;
  for (; at != end; ++at) hash = std::rotl(hash ^ (*at * kPrime5), 11) * kPrime1;
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace

uint64_t Checksum(const void* data, size_t size, uint64_t seed) {
  return Hash<false>(static_cast<const unsigned char*>(data), size, seed, nullptr);
}

uint64_t CopyAndChecksum(void* to, const void* from, size_t size) {
  return Hash<true>(static_cast<const unsigned char*>(from), size, 0, static_cast<unsigned char*>(to));
}

}  // namespace interlace
