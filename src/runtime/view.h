// view.h — tensors from known geometry. A program stores sizes, strides and offset of every value, so a view is built
// straight from its storage (about 100 ns, no dispatcher, no shape inference), and allocations know their exact size.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string>

#include "base/result.h"
#include "ir/program.h"

namespace interlace {

c10::ScalarType ScalarTypeOf(DType dtype);
// nullopt: a type that programs do not have.
std::optional<DType> DTypeOf(c10::ScalarType type);

// Sizes, strides and offset (elements from the root's start) of a value whose dims are all numbers.
struct Geometry {
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::SmallVector<int64_t, 5> sizes, strides;
  int64_t offset = 0;
  int64_t elements = 0;    // product of sizes
  int64_t span = 0;        // elements from the first to the last reachable one, inclusive; 0 when empty
  bool contiguous = true;  // row-major without gaps

  int64_t end_bytes() const;  // bytes of storage needed: (offset + span) * element size
};

// Error: a dim that is not a number (bind the program first).
Result<Geometry> GeometryOf(const Program& program, const Value& value);

// A tensor of this geometry over `storage`, made without any operator. Its autograd state is that of a plain tensor.
at::Tensor MakeView(const c10::Storage& storage, const Geometry& geometry);
// The same, where the storage is the root's and may be smaller than the geometry asks: then it throws c10::Error.
at::Tensor MakeCheckedView(const c10::Storage& storage, const Geometry& geometry);

// Fresh memory of `geometry` (its offset is ignored); 64-byte aligned on CPUs.
at::Tensor Allocate(const Geometry& geometry, c10::Device device, bool zero);

// Whether the tensor has exactly this dtype and these sizes; strides may differ only where a size is 1 or the tensor is
// empty.
bool SameSizes(const at::Tensor& tensor, const Geometry& geometry);
bool SameStrides(const at::Tensor& tensor, const Geometry& geometry);

// "f32[4,64]" in the words of the text format, for messages.
std::string Describe(const at::Tensor& tensor);
std::string Describe(const Geometry& geometry);

}  // namespace interlace
