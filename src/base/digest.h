// digest.h — SHA-256 (FIPS 180-4) of a program's text, by which ranks check that they run the same program, and HMAC,
// by which they prove what they know.
#pragma once

#include <string>
#include <string_view>

namespace interlace {

// 64 lower-case hexadecimal digits.
std::string Digest(std::string_view text);

// HMAC (RFC 2104) with SHA-256: 32 bytes that nobody makes without the key.
std::string Hmac(std::string_view key, std::string_view text);

}  // namespace interlace
