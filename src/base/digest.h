// digest.h — SHA-256 (FIPS 180-4) of a program's text, by which ranks check that they run the same program.
#pragma once

#include <string>
#include <string_view>

namespace interlace {

// 64 lower-case hexadecimal digits.
std::string Digest(std::string_view text);

}  // namespace interlace
