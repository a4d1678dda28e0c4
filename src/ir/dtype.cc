#include "ir/dtype.h"

#include <array>

namespace interlace {
namespace {

struct DTypeInfo {
  std::string_view name;
  int64_t bytes;
};
// In the order of the enum.
constexpr std::array<DTypeInfo, 14> kDTypes = {{{"f64", 8},
                                                {"f32", 4},
                                                {"f16", 2},
                                                {"bf16", 2},
                                                {"i64", 8},
                                                {"i32", 4},
                                                {"i16", 2},
                                                {"i8", 1},
                                                {"u8", 1},
                                                {"b8", 1},
                                                {"c64", 8},
                                                {"c128", 16},
                                                {"f8e4m3", 1},
                                                {"f8e5m2", 1}}};

}  // namespace

std::string_view DTypeName(DType dtype) {
  return kDTypes[static_cast<size_t>(dtype)].name;
}

std::optional<DType> ParseDType(std::string_view name) {
  for (size_t i = 0; i < kDTypes.size(); ++i) {
    if (kDTypes[i].name == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

int64_t DTypeBytes(DType dtype) {
  return kDTypes[static_cast<size_t>(dtype)].bytes;
}

bool IsFloating(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
    case DType::kF8E4M3:
    case DType::kF8E5M2:
      return true;
    default:
      return false;
  }
}

}  // namespace interlace
