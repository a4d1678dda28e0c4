#include "ir/testing/dense.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace interlace::testing {
namespace {

template <typename T>
double LoadAs(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return static_cast<double>(value);
}
template <typename T>
void StoreAs(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof(T));
}
int64_t ToInt(double value) {
  if (!(std::fabs(value) < 9.2e18)) return std::numeric_limits<int64_t>::min();
  return static_cast<int64_t>(value);
}
uint16_t ToBF16(double value) {
  uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(value));
  if (std::isnan(value)) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace

Dense Broadcast(const Dense& x, const std::vector<int64_t>& sizes) {
  if (x.sizes == sizes) return x;
  Dense out{sizes, std::vector<double>(Count(sizes))};
  size_t rank = sizes.size(), lead = rank - x.sizes.size();
  std::vector<int64_t> strides(rank, 0), index(rank, 0);
  int64_t stride = 1;
  for (size_t i = x.sizes.size(); i-- > 0;) {
    strides[lead + i] = x.sizes[i] == 1 ? 0 : stride;
    stride *= x.sizes[i];
  }
  int64_t from = 0;
  for (double& element : out.data) {
    element = x.data[from];
    for (size_t i = rank; i-- > 0;) {
      from += strides[i];
      if (++index[i] < sizes[i]) break;
      from -= strides[i] * sizes[i];
      index[i] = 0;
    }
  }
  return out;
}

bool CanStore(DType dtype) {
  return dtype != DType::kF16 && dtype != DType::kC64 && dtype != DType::kC128 && dtype != DType::kF8E4M3 &&
         dtype != DType::kF8E5M2;
}

double Load(DType dtype, const std::byte* at) {
  switch (dtype) {
    case DType::kF64:
      return LoadAs<double>(at);
    case DType::kF32:
      return LoadAs<float>(at);
    case DType::kBF16: {
      uint16_t bits;
      std::memcpy(&bits, at, 2);
      return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    }
    case DType::kI64:
      return LoadAs<int64_t>(at);
    case DType::kI32:
      return LoadAs<int32_t>(at);
    case DType::kI16:
      return LoadAs<int16_t>(at);
    case DType::kI8:
      return LoadAs<int8_t>(at);
    default:
      return LoadAs<uint8_t>(at);
  }
}

void Store(DType dtype, std::byte* at, double value) {
  switch (dtype) {
    case DType::kF64:
      StoreAs<double>(at, value);
      break;
    case DType::kF32:
      StoreAs<float>(at, static_cast<float>(value));
      break;
    case DType::kBF16:
      StoreAs<uint16_t>(at, ToBF16(value));
      break;
    case DType::kI64:
      StoreAs<int64_t>(at, ToInt(value));
      break;
    case DType::kI32:
      StoreAs<int32_t>(at, static_cast<int32_t>(ToInt(value)));
      break;
    case DType::kI16:
      StoreAs<int16_t>(at, static_cast<int16_t>(ToInt(value)));
      break;
    case DType::kI8:
      StoreAs<int8_t>(at, static_cast<int8_t>(ToInt(value)));
      break;
    case DType::kB8:
      StoreAs<uint8_t>(at, value != 0 ? 1 : 0);
      break;
    default:
      StoreAs<uint8_t>(at, static_cast<uint8_t>(ToInt(value)));
      break;
  }
}

DType SumDType(DType dtype) {
  return dtype == DType::kBF16 || dtype == DType::kF16 ? DType::kF32 : dtype;
}

double RoundTo(DType dtype, double value) {
  std::byte bytes[8];
  Store(dtype, bytes, value);
  return Load(dtype, bytes);
}

double Poison(DType dtype) {
  return IsFloating(dtype) ? std::numeric_limits<double>::quiet_NaN() : 77.0;
}

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t z = a + 0x9e3779b97f4a7c15u * (b + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

uint64_t HashText(std::string_view text) {
  uint64_t hash = text.size();
  for (char c : text) hash = Mix(hash, static_cast<unsigned char>(c));
  return hash;
}

double Uniform(uint64_t key) {
  return static_cast<double>(Mix(key, 12345) >> 11) * 0x1p-53;
}

}  // namespace interlace::testing
