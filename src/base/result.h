// result.h — errors as values. A Result<T> holds a T or an Error; user and input problems travel this way, never as
// aborts or exceptions. CHECK is for our own bugs only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <string_view>
#include <utility>

namespace interlace {

// What went wrong, in one sentence that also says what to do, and where (file:line:column or an op), if known.
struct Error {
  std::string message;
  std::string where;
  // "where: message", or the message alone.
  std::string ToString() const { return where.empty() ? message : where + ": " + message; }
};

struct Ok {};

namespace internal {
const Error* Keep(Error error);
void Drop(const Error* error);
[[noreturn]] void NoValue(const Error* error);  // a bug of ours: the value of a failure was asked for
[[noreturn]] void NoError();                    // likewise: the error of a success
}  // namespace internal

// A T, or else an error; errors are rare and stand apart. (Much lighter to compile than a std::variant, for there are
// hundreds.)
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}                      // NOLINT: implicit on purpose
  Result(Error error) : error_(internal::Keep(std::move(error))) {}  // NOLINT: implicit on purpose
  Result(const Result& other) : error_(other.ok() ? nullptr : internal::Keep(*other.error_)) {
    if (ok()) new (&value_) T(other.value_);
  }
  Result(Result&& other) noexcept : error_(other.ok() ? nullptr : internal::Keep(*other.error_)) {
    if (ok()) new (&value_) T(std::move(other.value_));
  }
  Result& operator=(Result other) noexcept {
    this->~Result();
    return *new (this) Result(std::move(other));
  }
  ~Result() {
    if (ok()) {
      value_.~T();
    } else {
      internal::Drop(error_);
    }
  }
  bool ok() const { return error_ == nullptr; }
  explicit operator bool() const = delete;  // ambiguous for Result<bool>; use ok()
  T& value() {
    if (!ok()) internal::NoValue(error_);
    return value_;
  }
  const T& value() const { return const_cast<Result*>(this)->value(); }
  T& operator*() { return value(); }
  const T& operator*() const { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  const Error& error() const {
    if (ok()) internal::NoError();
    return *error_;
  }

 private:
  const Error* error_ = nullptr;
  union {
    T value_;  // alive without an error
  };
};

using Status = Result<Ok>;

namespace internal {
// One part of a message. Errors are built in hundreds of places, each with types of its own: only this view of a part
// is compiled there, the text is put together in one place.
struct MessagePart {
  enum class Kind : uint8_t { kText, kSigned, kUnsigned, kReal };
  Kind kind;
  union {
    const char* text;
    int64_t integer;
    uint64_t natural;
    double real;
  };
  size_t size = 0;  // of the text
  MessagePart(std::string_view part)
      : kind(Kind::kText), text(part.data()), size(part.size()) {}                // NOLINT: implicit on purpose
  MessagePart(const std::string& part) : MessagePart(std::string_view(part)) {}   // NOLINT
  MessagePart(const char* part) : MessagePart(std::string_view(part)) {}          // NOLINT
  MessagePart(const char& part) : MessagePart(std::string_view(&part, 1)) {}      // NOLINT
  MessagePart(int part) : kind(Kind::kSigned), integer(part) {}                   // NOLINT
  MessagePart(long part) : kind(Kind::kSigned), integer(part) {}                  // NOLINT
  MessagePart(long long part) : kind(Kind::kSigned), integer(part) {}             // NOLINT
  MessagePart(unsigned part) : kind(Kind::kUnsigned), natural(part) {}            // NOLINT
  MessagePart(unsigned long part) : kind(Kind::kUnsigned), natural(part) {}       // NOLINT
  MessagePart(unsigned long long part) : kind(Kind::kUnsigned), natural(part) {}  // NOLINT
  MessagePart(double part) : kind(Kind::kReal), real(part) {}                     // NOLINT
};
std::string JoinParts(const MessagePart* parts, size_t count);
}  // namespace internal

// Builds an Error from texts, characters and numbers (a real with six digits).
template <typename... Parts>
Error MakeError(const Parts&... parts) {
  const internal::MessagePart list[] = {parts...};
  return Error{internal::JoinParts(list, sizeof...(parts)), {}};
}

// The message, for tests and for what is printed: "no error" of a Result that holds a value.
template <typename Outcome>
std::string ErrorOf(const Outcome& result) {
  return result.ok() ? "no error" : result.error().ToString();
}

// Returns the error of a Result-valued expression from the enclosing function.
#define INTERLACE_TRY(expr)                                              \
  do {                                                                   \
    const auto& interlace_try_result = (expr);                           \
    if (!interlace_try_result.ok()) return interlace_try_result.error(); \
  } while (false)

// Assigns the value of a Result to `lhs` (a declaration or a variable) or returns its error.
#define INTERLACE_CONCAT_(a, b) a##b
#define INTERLACE_CONCAT(a, b) INTERLACE_CONCAT_(a, b)
#define INTERLACE_ASSIGN(lhs, expr) INTERLACE_ASSIGN_(INTERLACE_CONCAT(interlace_r_, __LINE__), lhs, expr)
#define INTERLACE_ASSIGN_(tmp, lhs, expr) \
  auto tmp = (expr);                      \
  if (!tmp.ok()) return tmp.error();      \
  lhs = std::move(*tmp)

}  // namespace interlace
