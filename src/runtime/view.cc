#include "runtime/view.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <array>
#include <sstream>

namespace interlace {

namespace {

// In the order of DType.
constexpr std::array<c10::ScalarType, 14> kScalarTypes = {
    c10::kDouble,       c10::kFloat,         c10::kHalf,          c10::kBFloat16,   c10::kLong,
    c10::kInt,          c10::kShort,         c10::kChar,          c10::kByte,       c10::kBool,
    c10::kComplexFloat, c10::kComplexDouble, c10::kFloat8_e4m3fn, c10::kFloat8_e5m2};
static_assert(kScalarTypes.size() == static_cast<size_t>(DType::kF8E5M2) + 1);

std::string_view NameOf(c10::ScalarType type) {
  const std::optional<DType> dtype = DTypeOf(type);
  return dtype ? DTypeName(*dtype) : c10::toString(type);
}

template <typename Sizes>
std::string DescribeParts(c10::ScalarType type, const Sizes& sizes) {
  std::ostringstream out;
  out << NameOf(type) << '[';
  for (size_t i = 0; i < sizes.size(); ++i) out << (i ? "," : "") << sizes[i];
  out << ']';
  return out.str();
}

c10::DispatchKeySet KeysOf(const c10::Storage& storage) {
  return c10::DispatchKeySet(c10::computeDispatchKey(std::nullopt, std::nullopt, storage.device()));
}

}  // namespace

std::optional<DType> DTypeOf(c10::ScalarType type) {
  const auto found = std::ranges::find(kScalarTypes, type);
  if (found == kScalarTypes.end()) return std::nullopt;
  return static_cast<DType>(found - kScalarTypes.begin());
}

c10::ScalarType ScalarTypeOf(DType dtype) {
  return kScalarTypes[static_cast<size_t>(dtype)];
}

int64_t Geometry::end_bytes() const {
  return span == 0 ? 0 : (offset + span) * static_cast<int64_t>(c10::elementSize(dtype));
}

Result<Geometry> GeometryOf(const Program& program, const Value& value) {
  Geometry g;
  g.dtype = ScalarTypeOf(value.type.dtype);
  const auto number = [&](const Dim& dim) { return dim.is_const(); };
  bool bound = number(value.offset);
  for (const Dim& d : value.type.sizes) bound = bound && number(d);
  for (const Dim& d : value.type.strides) bound = bound && number(d);
  if (!bound) {
    return MakeError("%", value.id,
                     " still has symbolic sizes; give every symbol a number (Program.bind) before running");
  }
  g.offset = value.offset.value;
  g.elements = 1;
  int64_t last = 0, expected = 1;
  for (size_t i = 0; i < value.type.sizes.size(); ++i) {
    const int64_t size = value.type.sizes[i].value, stride = value.type.strides[i].value;
    if (size < 0 || stride < 0) return MakeError("%", value.id, " has a negative size or stride");
    g.sizes.push_back(size);
    g.strides.push_back(stride);
    if (__builtin_mul_overflow(g.elements, size, &g.elements))
      return MakeError("the size of %", value.id, " overflows");
    int64_t reach = 0;
    if (size > 0 && (__builtin_mul_overflow(size - 1, stride, &reach) || __builtin_add_overflow(last, reach, &last))) {
      return MakeError("the extent of %", value.id, " overflows");
    }
  }
  for (size_t i = g.sizes.size(); i-- > 0;) {
    if (g.sizes[i] != 1 && g.strides[i] != expected) g.contiguous = false;
    (void)__builtin_mul_overflow(expected, g.sizes[i], &expected);  // it may, where another size is 0
  }
  g.span = g.elements == 0 ? 0 : last + 1;
  if (g.elements == 0) g.contiguous = true;
  if (g.offset < 0 || g.offset + g.span > (int64_t{1} << 58))
    return MakeError("the place of %", value.id, " is out of range");
  return g;
}

at::Tensor MakeView(const c10::Storage& storage, const Geometry& g) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), KeysOf(storage),
                                                         c10::scalarTypeToTypeMeta(g.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(g.sizes, g.strides, g.offset);
  return tensor;
}

at::Tensor MakeCheckedView(const c10::Storage& storage, const Geometry& g) {
  TORCH_CHECK(static_cast<int64_t>(storage.nbytes()) >= g.end_bytes(), "a view of ", g.end_bytes(),
              " bytes does not fit in a storage of ", storage.nbytes(), " bytes");
  return MakeView(storage, g);
}

at::Tensor Allocate(const Geometry& g, c10::Device device, bool zero) {
  const auto options = c10::TensorOptions().dtype(g.dtype).device(device);
  at::Tensor flat = zero ? at::zeros({g.span}, options) : at::empty({g.span}, options);
  Geometry own = g;
  own.offset = 0;
  return MakeView(flat.storage(), own);
}

bool SameSizes(const at::Tensor& tensor, const Geometry& g) {
  return tensor.scalar_type() == g.dtype && tensor.sizes() == c10::IntArrayRef(g.sizes);
}

bool SameStrides(const at::Tensor& tensor, const Geometry& g) {
  if (g.elements == 0) return true;
  for (size_t i = 0; i < g.sizes.size(); ++i) {
    if (g.sizes[i] != 1 && tensor.stride(static_cast<int64_t>(i)) != g.strides[i]) return false;
  }
  return true;
}

std::string Describe(const at::Tensor& tensor) {
  return tensor.defined() ? DescribeParts(tensor.scalar_type(), tensor.sizes()) : "an undefined tensor";
}

std::string Describe(const Geometry& geometry) {
  return DescribeParts(geometry.dtype, geometry.sizes);
}

}  // namespace interlace
