// clones.h — one source, several instruction sets: a function marked INTERLACE_CLONES is compiled for the
// baseline, for AVX2 and for AVX-512 machines, and the loader picks. The bits are the same in all of them, because
// nothing contracts a*b+c (-ffp-contract=off) and no loop carries a reordered sum. And 16-bit floats whose conversions
// are plain arithmetic, so that loops over them become vector code.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && \
    !defined(__SANITIZE_ADDRESS__)
#define INTERLACE_CLONES [[gnu::target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")]]
#else
#define INTERLACE_CLONES
#endif

namespace interlace {

// IEEE half precision. Rounds to nearest, ties to even; NaNs become quiet with an empty payload, as in c10::Half.
struct Float16 {
  uint16_t bits;

  Float16() = default;
  explicit Float16(float value) {
    const auto x = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = x & 0x7fffffffu;
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    // Below 2^-14: adding 0.5 lets the addition round to multiples of 2^-24.
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // from 65520 on: infinity
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    bits = static_cast<uint16_t>(half | ((x >> 16) & 0x8000u));
  }
  operator float() const {  // NOLINT: implicit like the built-in floats
    const uint32_t magnitude = bits & 0x7fffu;
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    const auto subnormal = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t special = (magnitude << 13) | 0x7f800000u;
    const uint32_t wide = magnitude < 0x400u ? subnormal : magnitude >= 0x7c00u ? special : normal;
    return std::bit_cast<float>(wide | static_cast<uint32_t>(bits & 0x8000u) << 16);
  }
};

// The upper half of a float32. Rounds to nearest, ties to even; a NaN becomes 0x7fc0, as in c10::BFloat16.
struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  explicit BFloat16(float value) {
    const auto x = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
    bits = static_cast<uint16_t>((x & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
  }
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }  // NOLINT
};

// 16-bit types compute in float32, the others in their own type.
template <typename T>
using MathOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

}  // namespace interlace
