#include "base/result.h"

#include <cstdio>
#include <cstdlib>

#include "base/check.h"

namespace interlace::internal {

const Error* Keep(Error error) {
  return new Error(std::move(error));
}

void Drop(const Error* error) {
  delete error;
}

void NoValue(const Error* error) {
  CHECK(error == nullptr) << "the value of a failure was asked for: " << error->ToString();
  std::abort();
}

void NoError() {
  CHECK(false) << "the error of a success was asked for";
  std::abort();
}

std::string JoinParts(const MessagePart* parts, size_t count) {
  std::string out;
  for (const MessagePart* part = parts; part != parts + count; ++part) {
    switch (part->kind) {
      case MessagePart::Kind::kText:
        out.append(part->text, part->size);
        break;
      case MessagePart::Kind::kSigned:
        out += std::to_string(part->integer);
        break;
      case MessagePart::Kind::kUnsigned:
        out += std::to_string(part->natural);
        break;
      case MessagePart::Kind::kReal: {
        char digits[32];
        out.append(digits, static_cast<size_t>(std::snprintf(digits, sizeof digits, "%g", part->real)));
        break;
      }
    }
  }
  return out;
}

}  // namespace interlace::internal
