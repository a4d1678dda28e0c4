#include "base/scan.h"

#include <gtest/gtest.h>

#include "base/result.h"
#include "base/suggest.h"

namespace interlace {
namespace {

TEST(Scan, WordsNumbersStrings) {
  Scanner scan("  alpha.beta 42 \"a\\\"b\\n\\x01\" # rest\nnext", "f");
  scan.SkipToContent();
  EXPECT_EQ(scan.Word(true), "alpha.beta");
  scan.SkipBlanks();
  EXPECT_EQ(*scan.Int(), 42);
  scan.SkipBlanks();
  EXPECT_EQ(*scan.String(), "a\"b\n\x01");
  scan.SkipBlanks();
  EXPECT_TRUE(scan.AtLineEnd());
  scan.SkipToContent();
  EXPECT_FALSE(scan.EatWord("nex"));
  EXPECT_TRUE(scan.EatWord("next"));
  EXPECT_TRUE(scan.AtEnd());
}

TEST(Scan, ErrorsShowTheLine) {
  Scanner scan("one\n  two three\nfour", "file.il");
  scan.Seek(10);
  Error error = scan.ErrorHere("what is this");
  EXPECT_EQ(error.ToString(), "file.il:2:7: what is this\n    two three\n        ^");
  Scanner broken("\"abc\ndef\"", "x");
  EXPECT_EQ(broken.String().error().ToString(), "x:1:1: this string has no closing quote\n  \"abc\n  ^");
  Scanner big("99999999999999999999", "x");
  EXPECT_EQ(big.Int().error().ToString(), "x:1:1: this integer does not fit in 64 bits\n  99999999999999999999\n  ^");
}

TEST(Scan, LongAndBinaryLinesAreCut) {
  std::string line = std::string(500, 'a') + "\x01\xff" + std::string(500, 'b');
  std::string shown = LineWithCaret(line, 500);
  EXPECT_LT(shown.size(), 300u);
  EXPECT_NE(shown.find("aa??bb"), std::string::npos);
  size_t newline = shown.find('\n');
  EXPECT_EQ(shown[shown.size() - newline - 2], '?');  // the caret stands below the first odd byte
}

TEST(Suggest, NearestName) {
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3);
  EXPECT_EQ(EditDistance("shrad", "shard"), 1);
  EXPECT_EQ(DidYouMean("shrad", {"share", "shard", "zero1"}), ", did you mean 'shard'?");
  EXPECT_EQ(DidYouMean("prefetch", {"shard", "zero1"}), "");
  EXPECT_EQ(DidYouMean("", {"shard"}), "");
}

TEST(Result, AsksOfTheOtherKindAreBugsThatSaySo) {
  Result<int> good = 3, bad = MakeError("no ", 3);
  EXPECT_EQ(good.value(), 3);
  EXPECT_EQ(bad.error().ToString(), "no 3");
  EXPECT_DEATH((void)good.error(), "the error of a success was asked for");
  EXPECT_DEATH((void)bad.value(), "the value of a failure was asked for: no 3");
}

}  // namespace
}  // namespace interlace
