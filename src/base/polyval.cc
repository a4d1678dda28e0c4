#include "base/polyval.h"

#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace interlace {

namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie");

// x^128 + x^127 + x^126 + x^121 + 1 without its first and last term, as the high half of a block.
constexpr uint64_t kFold = 0xc200000000000000;

Polyval::By allowed_instructions = Polyval::By::kAny;

// The carry-less product of 32 bits by 32. Of each factor every fourth bit at a time: at most eight terms meet in a place
// of an ordinary product, which three bits above it take. No step depends on the values.
uint64_t Product32(uint32_t a, uint32_t b) {
  uint64_t out = 0;
  for (int place = 0; place < 4; ++place) {
    uint64_t sum = 0;
    for (int i = 0; i < 4; ++i) {
      const uint64_t x = a & uint32_t{0x11111111} << i, y = b & uint32_t{0x11111111} << ((place - i) & 3);
      sum ^= x * y;
    }
    out |= sum & uint64_t{0x1111111111111111} << place;
  }
  return out;
}

Block128 Product64(uint64_t a, uint64_t b) {
  const auto low = [](uint64_t word) { return static_cast<uint32_t>(word); };
  const auto high = [](uint64_t word) { return static_cast<uint32_t>(word >> 32); };
  const uint64_t below = Product32(low(a), low(b)), above = Product32(high(a), high(b));
  const uint64_t middle = Product32(low(a) ^ high(a), low(b) ^ high(b)) ^ below ^ above;
  return {below ^ middle << 32, above ^ middle >> 32};
}

// a * b * x^-128.
Block128 Dot(const Block128& a, const Block128& b) {
  Block128 below = Product64(a[0], b[0]), above = Product64(a[1], b[1]);
  const Block128 cross = Product64(a[0] ^ a[1], b[0] ^ b[1]);
  const uint64_t middle[2] = {cross[0] ^ below[0] ^ above[0], cross[1] ^ below[1] ^ above[1]};
  below[1] ^= middle[0];
  above[0] ^= middle[1];
  for (int half = 0; half < 2; ++half) {
    const Block128 folded = Product64(below[0], kFold);
    below = {below[1] ^ folded[0], below[0] ^ folded[1]};
  }
  return {above[0] ^ below[0], above[1] ^ below[1]};
}

#if defined(__x86_64__)

__attribute__((target("pclmul,sse4.1"))) inline __m128i Reduce(__m128i below, __m128i middle, __m128i above) {
  const __m128i fold = _mm_set_epi64x(static_cast<int64_t>(kFold), 1);
  below = _mm_xor_si128(below, _mm_slli_si128(middle, 8));
  above = _mm_xor_si128(above, _mm_srli_si128(middle, 8));
  for (int half = 0; half < 2; ++half)
    below = _mm_xor_si128(_mm_shuffle_epi32(below, 0x4e), _mm_clmulepi64_si128(below, fold, 0x10));
  return _mm_xor_si128(above, below);
}

// value = (value + block_0) power_0 + block_1 power_1 + ..., with one reduction.
__attribute__((target("pclmul,sse4.1"))) __m128i OneByOne(__m128i value, const Block128* powers, const __m128i* blocks,
                                                        size_t count) {
  __m128i below = _mm_setzero_si128(), middle = below, above = below;
  for (size_t i = 0; i < count; ++i) {
    __m128i block = _mm_loadu_si128(blocks + i);
    if (i == 0) block = _mm_xor_si128(block, value);
    const __m128i power = _mm_load_si128(reinterpret_cast<const __m128i*>(powers + i));
    below = _mm_xor_si128(below, _mm_clmulepi64_si128(block, power, 0x00));
    above = _mm_xor_si128(above, _mm_clmulepi64_si128(block, power, 0x11));
    middle = _mm_xor_si128(middle, _mm_xor_si128(_mm_clmulepi64_si128(block, power, 0x01),
                                                 _mm_clmulepi64_si128(block, power, 0x10)));
  }
  return Reduce(below, middle, above);
}

__attribute__((target("avx2"))) inline __m128i Both(__m256i sums) {
  return _mm_xor_si128(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
}

// The same, two blocks in a register.
__attribute__((target("vpclmulqdq,pclmul,avx2"))) __m128i ByPairs(__m128i value, const Block128* powers,
                                                               const __m128i* blocks, size_t count) {
  __m256i below = _mm256_setzero_si256(), middle = below, above = below;
  __m256i first = _mm256_zextsi128_si256(value);
#pragma GCC unroll 8
  for (size_t i = 0; i < count; i += 2) {
    const __m256i block = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(blocks + i)), first);
    first = _mm256_setzero_si256();
    const __m256i power = _mm256_load_si256(reinterpret_cast<const __m256i*>(powers + i));
    below = _mm256_xor_si256(below, _mm256_clmulepi64_epi128(block, power, 0x00));
    above = _mm256_xor_si256(above, _mm256_clmulepi64_epi128(block, power, 0x11));
    middle = _mm256_xor_si256(middle, _mm256_xor_si256(_mm256_clmulepi64_epi128(block, power, 0x01),
                                                       _mm256_clmulepi64_epi128(block, power, 0x10)));
  }
  return Reduce(Both(below), Both(middle), Both(above));
}

#endif

}  // namespace

void Polyval::Use(By by) {
  allowed_instructions = by;
}

Polyval::Polyval(const Block128& key) {
  powers_.back() = key;
}

void Polyval::Prepare() {
  for (size_t i = kAtOnce - 1; i-- > 0;) powers_[i] = Dot(powers_[i + 1], powers_.back());
  prepared_ = true;
}

void Polyval::Add(const void* data, size_t blocks) {
  const auto* at = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  static const bool narrow = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  static const bool wide = narrow && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx2");
  if (narrow && allowed_instructions != By::kNone) {
    if (blocks >= kAtOnce && !prepared_) Prepare();
    const auto sum = wide && allowed_instructions == By::kAny ? ByPairs : OneByOne;
    auto* const value = reinterpret_cast<__m128i*>(value_.data());
    while (blocks > 0) {
      const size_t count = blocks < kAtOnce ? 1 : kAtOnce;
      const auto with = count == 1 ? OneByOne : sum;
      const __m128i now = with(_mm_loadu_si128(value), powers_.data() + kAtOnce - count,
                               reinterpret_cast<const __m128i*>(at), count);
      _mm_storeu_si128(value, now);
      blocks -= count, at += 16 * count;
    }
    return;
  }
#endif
  for (; blocks > 0; --blocks, at += 16) {
    Block128 block;
    std::memcpy(block.data(), at, sizeof block);
    value_ = Dot({value_[0] ^ block[0], value_[1] ^ block[1]}, powers_.back());
  }
}

}  // namespace interlace
