// exact_sum.h — an exact sum of doubles: the same bits whatever the order and grouping of what is added.
//
// A sum is 68 int64 limbs. Limbs 0..65 hold a fixed-point number: limb i weighs 2^(32 i - 1074), so bit 0 is the
// smallest double and limb 65 leaves room above the largest. A normalized limb holds 32 bits, so the limbs of up to
// 2^30 normalized sums may be added elementwise as int64 (an all-reduce) before they are normalized again. Limb 66
// counts +inf in its low and -inf in its high half, limb 67 counts NaN.
//   limbs:  [0]       [1]  ...  [33]        ...  [65]        [66]       [67]
//   weight: 2^-1074   2^-1042   2^-18 .. 2^13    2^1006 ..   infinite   nan
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace interlace {

class ExactSum {
 public:
  static constexpr int kLimbs = 68;
  static constexpr int kNumberLimbs = 66;
  static constexpr int64_t kBlock = 32;  // elements of one block of squares

  ExactSum() { limbs_.fill(0); }
  // From the limbs of another sum, or of several added elementwise.
  explicit ExactSum(const int64_t* limbs) {
    std::copy(limbs, limbs + kLimbs, limbs_.begin());
    Normalize();
  }

  void Add(double value) {
    uint64_t bits = std::bit_cast<uint64_t>(value);
    int exponent = static_cast<int>((bits >> 52) & 0x7ff);
    uint64_t mantissa = bits & ((uint64_t{1} << 52) - 1);
    bool negative = (bits >> 63) != 0;
    if (exponent == 0x7ff) {
      if (mantissa != 0) {
        limbs_[67] = 1;
      } else {
        limbs_[66] |= negative ? int64_t{1} << 32 : 1;
      }
      return;
    }
    if (exponent > 0) mantissa |= uint64_t{1} << 52;
    int shift = std::max(exponent, 1) - 1;       // of the mantissa's bit 0 above 2^-1074
    int limb = shift / 32, within = shift % 32;  // limb + 2 <= 65
    uint64_t low = mantissa << within;
    uint64_t high = within == 0 ? 0 : mantissa >> (64 - within);
    int64_t sign = negative ? -1 : 1;
    limbs_[limb] += sign * static_cast<int64_t>(low & 0xffffffffu);
    limbs_[limb + 1] += sign * static_cast<int64_t>(low >> 32);
    limbs_[limb + 2] += sign * static_cast<int64_t>(high);
    if (++pending_ == kMaxPending) Normalize();
  }

  void Add(const ExactSum& other) {
    ExactSum copy = other;
    copy.Normalize();
    Normalize();
    for (int i = 0; i < kNumberLimbs; ++i) limbs_[i] += copy.limbs_[i];
    limbs_[66] |= copy.limbs_[66];
    limbs_[67] |= copy.limbs_[67];
    Normalize();
  }

  // Adds x*x of `count` elements in blocks of 32. Within a block: eight float64 sums over elements j, j+8, j+16, j+24,
  // then ((0+4)+(2+6)) + ((1+5)+(3+7)). Compilers turn it into vector code without changing a bit.
  template <typename T>
  void AddSquares(const T* data, int64_t count) {
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      double lanes[8] = {};
      if (begin + kBlock <= count) {
        for (int64_t i = 0; i < kBlock; i += 8) {
          for (int64_t j = 0; j < 8; ++j) {
            double x = static_cast<double>(data[begin + i + j]);
            lanes[j] += x * x;
          }
        }
      } else {
        for (int64_t i = begin; i < count; ++i) {
          double x = static_cast<double>(data[i]);
          lanes[(i - begin) % 8] += x * x;
        }
      }
      Add(((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7])));
    }
  }

  // The 68 limbs, normalized.
  const std::array<int64_t, kLimbs>& Limbs() {
    Normalize();
    return limbs_;
  }

  // The double nearest to the sum (ties to even); inf or nan when such were added or the sum is beyond doubles.
  double Round() const {
    ExactSum copy = *this;
    copy.Normalize();
    bool plus = (copy.limbs_[66] & 0xffffffff) != 0, minus = (copy.limbs_[66] >> 32) != 0;
    if (copy.limbs_[67] != 0 || (plus && minus)) return std::numeric_limits<double>::quiet_NaN();
    if (plus || minus) return (minus ? -1 : 1) * std::numeric_limits<double>::infinity();
    bool negative = copy.limbs_[kNumberLimbs - 1] < 0;
    if (negative) {
      for (int i = 0; i < kNumberLimbs; ++i) copy.limbs_[i] = -copy.limbs_[i];
      copy.Normalize();
    }
    double magnitude = copy.RoundMagnitude();
    return negative ? -magnitude : magnitude;
  }

 private:
  static constexpr int64_t kMaxPending = int64_t{1} << 30;

  // Carries: limbs 0..64 into [0, 2^32), the sign stays in limb 65; the flags become 0 or 1.
  void Normalize() {
    int64_t carry = 0;
    for (int i = 0; i < kNumberLimbs - 1; ++i) {
      int64_t total = limbs_[i] + carry;
      carry = total >> 32;  // floor
      limbs_[i] = total & 0xffffffff;
    }
    limbs_[kNumberLimbs - 1] += carry;
    limbs_[66] = ((limbs_[66] & 0xffffffff) != 0 ? 1 : 0) | ((limbs_[66] >> 32) != 0 ? int64_t{1} << 32 : 0);
    limbs_[67] = limbs_[67] != 0 ? 1 : 0;
    pending_ = 0;
  }

  // One bit of a normalized sum that is not negative.
  bool Bit(int position) const {
    int limb = std::min(position / 32, kNumberLimbs - 1);
    return ((limbs_[limb] >> (position - limb * 32)) & 1) != 0;
  }

  double RoundMagnitude() const {
    int top = -1;  // highest set bit; limb 65 may hold up to 63 bits
    for (int limb = kNumberLimbs - 1; limb >= 0 && top < 0; --limb) {
      if (limbs_[limb] != 0) top = limb * 32 + 63 - std::countl_zero(static_cast<uint64_t>(limbs_[limb]));
    }
    if (top < 0) return 0.0;
    int low = std::max(top - 52, 0);  // 53 bits are kept; fewer exist among the denormals
    uint64_t mantissa = 0;
    for (int i = top; i >= low; --i) mantissa = mantissa << 1 | (Bit(i) ? 1 : 0);
    if (low > 0 && Bit(low - 1)) {
      bool sticky = false;
      for (int i = 0; i < low - 1 && !sticky; ++i) sticky = Bit(i);
      if (sticky || (mantissa & 1) != 0) ++mantissa;
    }
    return std::ldexp(static_cast<double>(mantissa), low - 1074);  // exact, or inf beyond the doubles
  }

  std::array<int64_t, kLimbs> limbs_;
  int64_t pending_ = 0;
};

}  // namespace interlace
