#include "cost/profile_table.h"

#include <algorithm>

#include "base/scan.h"

namespace interlace {
namespace {

// Kinds of work that slow one another. Pairs are kept in this order.
const std::vector<std::string_view> kTogether = {"compute", "collective", "h2d", "d2h", "file_read", "file_write"};
constexpr int64_t kVersion = 2;

class ProfileReader {
 public:
  ProfileReader(std::string_view text, std::string_view file) : in_(text, file) {}

  Result<ProfileTable> Run() {
    INTERLACE_ASSIGN(version_, in_.Header("profile", 1, kVersion, "measure again"));
    while (!in_.AtEnd()) {
      INTERLACE_TRY(Line());
      INTERLACE_TRY(in_.EndLine());
    }
    return std::move(out_);
  }

 private:
  Status Line() {
    size_t begin = in_.pos();
    INTERLACE_ASSIGN(std::string_view word, in_.OneOf("line", {"fingerprint", "op", "collective", "core", "finish",
                                                               "copy", "issue", "together", "interference"}));
    in_.SkipBlanks();
    if (word == "op") return OpLine();
    if (word == "collective") return CollectiveLine(out_.collectives);
    if (word == "core") return CollectiveLine(out_.core);
    if (word == "finish") return CollectiveLine(out_.finish);
    if (word == "issue") return IssueLine(begin);
    if (word == "copy") return CopyLine();
    if (word == "together") return TogetherLine(begin);
    if (word == "interference") return InterferenceLine();
    INTERLACE_ASSIGN(out_.fingerprint, in_.String());
    return Ok{};
  }

  Status OpLine() {
    size_t begin = in_.pos();
    INTERLACE_ASSIGN(std::string key, in_.String());
    OpTiming timing;
    INTERLACE_ASSIGN(timing.us, Micros());
    INTERLACE_ASSIGN(timing.bytes, Count("bytes", 0));
    INTERLACE_ASSIGN(timing.transient_bytes, Count("transient", 0));
    in_.SkipBlanks();
    if (in_.EatWord("estimated")) {
      timing.measured = false;
    } else if (!in_.EatWord("measured")) {
      return in_.ErrorHere("expected 'measured' or 'estimated', found " + in_.Found());
    }
    if (!out_.ops.emplace(std::move(key), timing).second) return in_.ErrorAt(begin, "this op is given twice");
    return Ok{};
  }

  Result<std::string> Kind(const std::vector<std::string_view>& known) {
    INTERLACE_ASSIGN(std::string_view kind, in_.OneOf("kind", known));
    return std::string(kind);
  }

  Status CollectiveLine(ProfileTable::Sweeps& sweeps) {
    INTERLACE_ASSIGN(std::string kind, Kind({"gather", "reduce", "all_reduce", "broadcast", "all_to_all", "p2p"}));
    INTERLACE_ASSIGN(std::string ranks, Ranks());
    return Point(sweeps[{kind, ranks}]);
  }
  // "2", "2/4", "2+2/2", "2/2x2"; "1+2" of shards that are whole
  Result<std::string> Ranks() {
    INTERLACE_ASSIGN(const int64_t first, Count("ranks", 1));
    if (first == 1 && in_.Peek() != '+') return in_.ErrorHere("'ranks' must be at least 2");
    std::string word = std::to_string(first);
    while (in_.Peek() == '/' || in_.Peek() == '+' || in_.Peek() == 'x') {
      word += in_.Peek();
      in_.Advance();
      INTERLACE_ASSIGN(const int64_t next, in_.Int());
      word += std::to_string(next);
    }
    return word;
  }
  Status IssueLine(size_t begin) {
    if (out_.issue_us) return in_.ErrorAt(begin, "the time to start a transfer is given twice");
    INTERLACE_ASSIGN(out_.issue_us, Micros());
    return Ok{};
  }
  Status CopyLine() {
    INTERLACE_ASSIGN(std::string kind, Kind({"h2d", "d2h", "file_read", "file_write"}));
    return Point(out_.copies[kind]);
  }
  Status Point(Sweep& sweep) {
    size_t begin = in_.pos();
    INTERLACE_ASSIGN(int64_t bytes, Count("bytes", 0));
    INTERLACE_ASSIGN(double us, Micros());
    Status status = sweep.Add(bytes, us);
    return status.ok() ? status : in_.ErrorAt(begin, status.error().message);
  }

  // together KIND FACTOR KIND FACTOR, in either order.
  Status TogetherLine(size_t begin) {
    if (version_ < 2) return in_.ErrorAt(begin, "a profile of version 1 has no pairs: the first line must say 2");
    std::pair<std::string, double> members[2];
    for (auto& [kind, factor] : members) {
      in_.SkipBlanks();
      INTERLACE_ASSIGN(kind, Kind(kTogether));
      INTERLACE_ASSIGN(factor, Factor());
    }
    if (members[0].first == members[1].first)
      return in_.ErrorAt(begin, "two kinds of work are needed, '" + members[0].first + "' is given for both");
    const auto place = [](std::string_view kind) { return std::find(kTogether.begin(), kTogether.end(), kind); };
    if (place(members[0].first) > place(members[1].first)) std::swap(members[0], members[1]);
    const bool added =
        out_.together
            .emplace(std::pair(members[0].first, members[1].first), std::pair(members[0].second, members[1].second))
            .second;
    return added ? Status(Ok{}) : in_.ErrorAt(begin, "these two are given twice");
  }

  Result<double> Factor() {
    in_.SkipBlanks();
    size_t begin = in_.pos();
    INTERLACE_ASSIGN(double factor, in_.Real());
    if (!(factor >= 1 && factor <= 1000)) return in_.ErrorAt(begin, "a factor is a number from 1 to 1000");
    return factor;
  }

  Status InterferenceLine() {
    size_t begin = in_.pos();
    if (!out_.interference.empty()) return in_.ErrorAt(begin, "the factors are given twice");
    INTERLACE_TRY(in_.Expect("["));
    do {
      INTERLACE_ASSIGN(double factor, Factor());
      out_.interference.push_back(factor);
      in_.SkipBlanks();
    } while (in_.Eat(','));
    if (!in_.Eat(']')) return in_.ErrorHere("expected ',' or ']', found " + in_.Found());
    if (out_.interference.size() != 28)
      return in_.ErrorAt(begin, "expected 28 factors, found " + std::to_string(out_.interference.size()));
    return Ok{};
  }

  Result<int64_t> Count(std::string_view word, int64_t least) {
    INTERLACE_TRY(in_.Expect(word));
    size_t begin = in_.pos();
    INTERLACE_ASSIGN(int64_t value, in_.Int());
    if (value < least)
      return in_.ErrorAt(begin, "'" + std::string(word) + "' must be at least " + std::to_string(least));
    return value;
  }
  Result<double> Micros() {
    INTERLACE_TRY(in_.Expect("us"));
    size_t begin = in_.pos();
    INTERLACE_ASSIGN(double value, in_.Real());
    if (!(value > 0 && value < 1e12)) return in_.ErrorAt(begin, "a time must be above zero and below 1e12 us");
    return value;
  }

  Scanner in_;
  int64_t version_ = 0;
  ProfileTable out_;
};

}  // namespace

Status Sweep::Add(int64_t bytes, double us) {
  if (!points_.emplace(bytes, us).second) return MakeError("the size ", bytes, " is given twice");
  return Ok{};
}

std::optional<double> Sweep::Us(double bytes) const {
  if (points_.empty()) return std::nullopt;
  auto after = points_.lower_bound(static_cast<int64_t>(std::min(bytes, 9e18)));
  if (points_.size() == 1) {
    // One point says nothing of latency: in proportion above it, the same below.
    auto [size, us] = *points_.begin();
    return bytes <= static_cast<double>(size) || size == 0 ? us : us * bytes / static_cast<double>(size);
  }
  if (after == points_.begin()) return after->second;  // smaller than the smallest: latency
  if (after == points_.end()) --after;
  auto before = std::prev(after);
  double x0 = static_cast<double>(before->first), x1 = static_cast<double>(after->first);
  double us = before->second + (after->second - before->second) * (bytes - x0) / (x1 - x0);
  return std::max(us, std::min(before->second, after->second));
}

Result<bool> IsOfAnotherMachine(const ProfileTable& profile, const std::string& machine, bool may_be) {
  if (machine.empty() || machine == profile.fingerprint) return false;
  if (may_be) return true;
  return MakeError("the profile was measured on another machine ('", profile.fingerprint, "', here '", machine,
                   "'); measure here, or allow it with --foreign");
}

Result<ProfileTable> ParseProfile(std::string_view text, std::string_view file) {
  return ProfileReader(text, file).Run();
}

}  // namespace interlace
