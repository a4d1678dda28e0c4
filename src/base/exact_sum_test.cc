#include "base/exact_sum.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace interlace {
namespace {

// Schoolbook big integers as the referee: sign and magnitude, one bit a byte, in units of 2^-1074.
class BigBits {
 public:
  void Add(double value) {
    int exponent;
    double fraction = std::frexp(std::fabs(value), &exponent);  // fraction in [0.5, 1)
    auto mantissa = static_cast<uint64_t>(std::ldexp(fraction, 53));
    int shift = exponent - 53 + 1074;
    for (; shift < 0; ++shift) mantissa >>= 1;  // exact: denormals have zeros there
    std::vector<int> bits(kBits, 0);
    for (int i = 0; i < 53; ++i) bits[shift + i] = (mantissa >> i) & 1;
    AddSigned(bits, value < 0);
  }

  double Round() const {
    int top = kBits - 1;
    while (top >= 0 && bits_[top] == 0) --top;
    if (top < 0) return 0;
    // Nearest by comparison: the two doubles round the value, by their bits.
    int low = std::max(0, top - 52);
    uint64_t mantissa = 0;
    for (int i = top; i >= low; --i) mantissa = mantissa * 2 + bits_[i];
    bool half = low > 0 && bits_[low - 1] == 1, rest = false;
    for (int i = 0; i + 1 < low; ++i) rest |= bits_[i] == 1;
    if (half && (rest || mantissa % 2 == 1)) ++mantissa;
    double out = std::ldexp(static_cast<double>(mantissa), low - 1074);
    return negative_ ? -out : out;
  }

 private:
  static constexpr int kBits = 2200;
  static int Compare(const std::vector<int>& a, const std::vector<int>& b) {
    for (int i = kBits - 1; i >= 0; --i) {
      if (a[i] != b[i]) return a[i] < b[i] ? -1 : 1;
    }
    return 0;
  }
  void AddSigned(std::vector<int> other, bool negative) {
    if (negative == negative_) {
      int carry = 0;
      for (int i = 0; i < kBits; ++i) {
        int total = bits_[i] + other[i] + carry;
        bits_[i] = total % 2;
        carry = total / 2;
      }
      return;
    }
    if (Compare(bits_, other) < 0) {
      bits_.swap(other);
      negative_ = negative;
    }
    int borrow = 0;
    for (int i = 0; i < kBits; ++i) {
      int total = bits_[i] - other[i] - borrow;
      borrow = total < 0 ? 1 : 0;
      bits_[i] = total + 2 * borrow;
    }
  }
  std::vector<int> bits_ = std::vector<int>(kBits, 0);
  bool negative_ = false;
};

double RandomDouble(std::mt19937_64& random, bool wide) {
  int exponent = static_cast<int>(random() % (wide ? 2040 : 60)) - (wide ? 1060 : 30);
  double value = std::ldexp(static_cast<double>(random() % (uint64_t{1} << 53)), exponent - 52);
  return random() % 2 == 0 ? value : -value;
}

TEST(ExactSum, EqualsLongArithmetic) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 60; ++round) {
    ExactSum sum;
    BigBits expected;
    for (int i = 0; i < 40; ++i) {
      double value = RandomDouble(random, round % 2 == 0);
      sum.Add(value);
      expected.Add(value);
      if (i % 8 == 0) {
        double back = -value * (i % 16 == 0 ? 1.0 : 0.5);  // cancellation
        sum.Add(back);
        expected.Add(back);
      }
    }
    EXPECT_EQ(sum.Round(), expected.Round()) << "round " << round;
  }
}

TEST(ExactSum, ExactCancellationAndTies) {
  ExactSum sum;
  sum.Add(1e308);
  sum.Add(5e-324);
  sum.Add(-1e308);
  EXPECT_EQ(sum.Round(), 5e-324);
  ExactSum tie;  // 2^53 + 1 lies between two doubles: ties go to even, one denormal more goes up
  tie.Add(9007199254740992.0);
  tie.Add(1.0);
  EXPECT_EQ(tie.Round(), 9007199254740992.0);
  tie.Add(5e-324);
  EXPECT_EQ(tie.Round(), 9007199254740994.0);
  ExactSum minus;
  minus.Add(1.0);
  minus.Add(-3.5);
  EXPECT_EQ(minus.Round(), -2.5);
  EXPECT_EQ(ExactSum().Round(), 0.0);
}

TEST(ExactSum, OrderAndGroupingDoNotMatter) {
  std::mt19937_64 random(2);
  std::vector<double> values;
  for (int i = 0; i < 3000; ++i) values.push_back(RandomDouble(random, false));
  ExactSum all;
  for (double value : values) all.Add(value);
  // Four "ranks", limbs added elementwise as an all-reduce does.
  std::shuffle(values.begin(), values.end(), random);
  ExactSum ranks[4];
  for (size_t i = 0; i < values.size(); ++i) ranks[random() % 4].Add(values[i]);
  std::array<int64_t, ExactSum::kLimbs> limbs{};
  for (ExactSum& rank : ranks) {
    for (int i = 0; i < ExactSum::kLimbs; ++i) limbs[i] += rank.Limbs()[i];
  }
  EXPECT_EQ(ExactSum(limbs.data()).Limbs(), all.Limbs());
  EXPECT_EQ(ExactSum(limbs.data()).Round(), all.Round());
  ExactSum joined = ranks[0];
  for (int i = 1; i < 4; ++i) joined.Add(ranks[i]);
  EXPECT_EQ(joined.Limbs(), all.Limbs());
}

TEST(ExactSum, InfinityNanAndOverflow) {
  const double inf = std::numeric_limits<double>::infinity();
  ExactSum sum;
  sum.Add(inf);
  sum.Add(1.0);
  EXPECT_EQ(sum.Round(), inf);
  std::array<int64_t, ExactSum::kLimbs> doubled = sum.Limbs();
  for (int64_t& limb : doubled) limb *= 2;  // two ranks with an infinity each
  EXPECT_EQ(ExactSum(doubled.data()).Round(), inf);
  sum.Add(-inf);
  EXPECT_TRUE(std::isnan(sum.Round()));
  ExactSum minus;
  minus.Add(-inf);
  EXPECT_EQ(minus.Round(), -inf);
  ExactSum nan;
  nan.Add(std::numeric_limits<double>::quiet_NaN());
  EXPECT_TRUE(std::isnan(nan.Round()));
  ExactSum large;
  const double max = std::numeric_limits<double>::max();
  for (int i = 0; i < 100; ++i) large.Add(max);
  EXPECT_EQ(large.Round(), inf);
  for (int i = 0; i < 99; ++i) large.Add(-max);
  EXPECT_EQ(large.Round(), max);
}

TEST(ExactSum, SquaresSplitAtBlocks) {
  std::mt19937_64 random(3);
  std::vector<float> data(32 * 40);
  for (float& x : data) x = static_cast<float>(RandomDouble(random, false));
  ExactSum whole;
  whole.AddSquares(data.data(), static_cast<int64_t>(data.size()));
  ExactSum parts[2];
  parts[0].AddSquares(data.data() + 32 * 13, 32 * 27);
  parts[1].AddSquares(data.data(), 32 * 13);
  parts[0].Add(parts[1]);
  EXPECT_EQ(parts[0].Limbs(), whole.Limbs());
  long double reference = 0;
  for (float x : data) reference += static_cast<long double>(x) * x;
  EXPECT_NEAR(whole.Round() / static_cast<double>(reference), 1.0, 1e-12);
}

}  // namespace
}  // namespace interlace
