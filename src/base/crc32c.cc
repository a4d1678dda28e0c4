#include "base/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace interlace {

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected

using Table = std::array<std::array<uint32_t, 256>, 8>;

constexpr Table MakeTable() {
  Table table = {};
  for (uint32_t n = 0; n < 256; ++n) {
    uint32_t crc = n;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? crc >> 1 ^ kPolynomial : crc >> 1;
    table[0][n] = crc;
  }
  for (uint32_t n = 0; n < 256; ++n) {
    for (size_t k = 1; k < 8; ++k) table[k][n] = table[k - 1][n] >> 8 ^ table[0][table[k - 1][n] & 0xff];
  }
  return table;
}
constexpr Table kTable = MakeTable();

static_assert(std::endian::native == std::endian::little, "words are read as they lie");

uint64_t Word(const unsigned char* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

#if defined(__x86_64__)

// What a checksum becomes when `bytes` zeros follow, a byte of it at a time: linear, so four look-ups.
using Shift = std::array<std::array<uint32_t, 256>, 4>;

Shift MakeShift(size_t bytes) {
  const std::array<unsigned char, 64> zeros = {};
  std::array<uint32_t, 32> of_bit;
  for (int bit = 0; bit < 32; ++bit) {
    uint32_t crc = ~(uint32_t{1} << bit);  // the complements at both ends cancel out
    for (size_t done = 0; done < bytes; done += zeros.size()) crc = Crc32cByTable(crc, zeros.data(), zeros.size());
    of_bit[bit] = ~crc;
  }
  Shift shift = {};
  for (int part = 0; part < 4; ++part) {
    for (uint32_t n = 0; n < 256; ++n) {
      for (int bit = 0; bit < 8; ++bit) shift[part][n] ^= (n >> bit & 1) != 0 ? of_bit[8 * part + bit] : 0;
    }
  }
  return shift;
}

uint32_t Apply(const Shift& shift, uint32_t crc) {
  return shift[0][crc & 0xff] ^ shift[1][crc >> 8 & 0xff] ^ shift[2][crc >> 16 & 0xff] ^ shift[3][crc >> 24];
}

// The instruction takes three cycles and one can begin in each, so three stretches are summed side by side.
__attribute__((target("sse4.2"))) const unsigned char* Stretches(uint64_t& crc, const unsigned char* at, size_t& size,
                                                                 size_t stretch, const Shift& shift) {
  while (size >= 3 * stretch) {
    uint64_t b = 0, c = 0;
    for (const unsigned char* const end = at + stretch; at != end; at += 8) {
      crc = _mm_crc32_u64(crc, Word(at));
      b = _mm_crc32_u64(b, Word(at + stretch));
      c = _mm_crc32_u64(c, Word(at + 2 * stretch));
    }
    crc = Apply(shift, static_cast<uint32_t>(crc)) ^ b;
    crc = Apply(shift, static_cast<uint32_t>(crc)) ^ c;
    at += 2 * stretch;
    size -= 3 * stretch;
  }
  return at;
}

// x^n modulo the polynomial, reflected, as a factor of carry-less products.
constexpr int64_t Power(int n) {
  uint32_t power = 0x80000000;
  for (; n > 0; --n) power = (power & 1) != 0 ? power >> 1 ^ kPolynomial : power >> 1;
  return static_cast<int64_t>(uint64_t{power} << 1);
}

// 256 bytes at a time are multiplied by x^2048 and added to the next ones: what is left has the checksum of all. Source:
// Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction, Intel 2009.
__attribute__((target("avx512f,avx512vl,vpclmulqdq,sse4.2"))) const unsigned char* Fold(uint64_t& crc, const unsigned char* at,
                                                                                        size_t& size) {
  constexpr int kBits = 2048;
  constexpr int64_t kLow = Power(kBits + 32), kHigh = Power(kBits - 32);
  const __m512i powers = _mm512_set4_epi64(kHigh, kLow, kHigh, kLow);
  __m512i sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = _mm512_loadu_si512(at + 64 * i);
  sum[0] = _mm512_xor_si512(sum[0], _mm512_zextsi128_si512(_mm_cvtsi64_si128(static_cast<int64_t>(crc))));
  for (size -= 256, at += 256; size >= 256; size -= 256, at += 256) {
    for (int i = 0; i < 4; ++i) {
      const __m512i low = _mm512_clmulepi64_epi128(sum[i], powers, 0x00);
      const __m512i high = _mm512_clmulepi64_epi128(sum[i], powers, 0x11);
      sum[i] = _mm512_ternarylogic_epi64(low, high, _mm512_loadu_si512(at + 64 * i), 0x96);  // the sum of the three
    }
  }
  crc = 0;
  for (const __m512i& part : sum) {
    alignas(64) uint64_t words[8];
    _mm512_store_si512(words, part);
    for (uint64_t word : words) crc = _mm_crc32_u64(crc, word);
  }
  return at;
}

__attribute__((target("sse4.2"))) uint32_t ByInstruction(uint32_t before, const unsigned char* at, size_t size) {
  // From memory, stretches of a page are read at 13 GB/s, of four at 16: more lines in a row are fetched ahead.
  constexpr size_t kPages = 16384, kLong = 2048, kShort = 256;
  static const Shift by_pages = MakeShift(kPages), by_long = MakeShift(kLong), by_short = MakeShift(kShort);
  static const bool folds = __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("vpclmulqdq");
  uint64_t crc = static_cast<uint32_t>(~before);
  if (folds && size >= 1024) at = Fold(crc, at, size);
  at = Stretches(crc, at, size, kPages, by_pages);
  at = Stretches(crc, at, size, kLong, by_long);
  at = Stretches(crc, at, size, kShort, by_short);
  for (; size >= 8; size -= 8, at += 8) crc = _mm_crc32_u64(crc, Word(at));
  for (; size > 0; --size, ++at) crc = _mm_crc32_u8(static_cast<uint32_t>(crc), *at);
  return ~static_cast<uint32_t>(crc);
}

#endif

}  // namespace

uint32_t Crc32cByTable(uint32_t before, const void* data, size_t size) {
  const auto* at = static_cast<const unsigned char*>(data);
  uint32_t crc = ~before;
  for (; size >= 8; size -= 8, at += 8) {
    const uint64_t word = Word(at) ^ crc;
    crc = kTable[7][word & 0xff] ^ kTable[6][word >> 8 & 0xff] ^ kTable[5][word >> 16 & 0xff] ^
          kTable[4][word >> 24 & 0xff] ^ kTable[3][word >> 32 & 0xff] ^ kTable[2][word >> 40 & 0xff] ^
          kTable[1][word >> 48 & 0xff] ^ kTable[0][word >> 56];
  }
  for (; size > 0; --size, ++at) crc = crc >> 8 ^ kTable[0][(crc ^ *at) & 0xff];
  return ~crc;
}

uint32_t Crc32c(uint32_t before, const void* data, size_t size) {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("sse4.2");
  if (has) return ByInstruction(before, static_cast<const unsigned char*>(data), size);
#endif
  return Crc32cByTable(before, data, size);
}

}  // namespace interlace
