// dtype.h — element types, their names in the text format and their sizes.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace interlace {

enum class DType : uint8_t { kF64, kF32, kF16, kBF16, kI64, kI32, kI16, kI8, kU8, kB8, kC64, kC128, kF8E4M3, kF8E5M2 };

// "f32", "bf16", ...
std::string_view DTypeName(DType dtype);
std::optional<DType> ParseDType(std::string_view name);
// Bytes of one element.
int64_t DTypeBytes(DType dtype);
bool IsFloating(DType dtype);

}  // namespace interlace
