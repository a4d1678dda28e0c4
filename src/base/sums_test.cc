// The checksum and the tags that go over networks, by the vectors of their sources.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "base/digest.h"

namespace interlace {
namespace {

TEST(Crc32c, IsThatOfTheStandard) {  // RFC 3720, B.4
  EXPECT_EQ(Crc32c(0, "123456789", 9), 0xe3069283u);
  EXPECT_EQ(Crc32c(0, std::string(32, '\0').data(), 32), 0x8a9136aau);
  EXPECT_EQ(Crc32c(0, std::string(32, '\xff').data(), 32), 0x62a8ab43u);
}

TEST(Crc32c, TheInstructionGivesWhatTheTableGives) {
  std::mt19937_64 random(7);
  std::vector<unsigned char> data(40'000);
  for (unsigned char& byte : data) byte = static_cast<unsigned char>(random());
  for (int i = 0; i < 300; ++i) {
    const size_t begin = random() % 100, size = random() % (i % 3 == 0 ? 100 : 39'000), cut = random() % (size + 1);
    const uint32_t whole = Crc32cByTable(0, data.data() + begin, size);
    EXPECT_EQ(Crc32c(0, data.data() + begin, size), whole);
    EXPECT_EQ(Crc32c(Crc32c(0, data.data() + begin, cut), data.data() + begin + cut, size - cut), whole);
  }
}

TEST(Hmac, IsThatOfTheStandard) {  // RFC 4231, cases 1, 2 and 6
  const auto hex = [](const std::string& bytes) {
    std::string out;
    for (unsigned char c : bytes) out += "0123456789abcdef"[c >> 4], out += "0123456789abcdef"[c & 15];
    return out;
  };
  EXPECT_EQ(hex(Hmac(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(Hmac("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(Hmac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

}  // namespace
}  // namespace interlace
