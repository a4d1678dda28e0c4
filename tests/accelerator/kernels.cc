// Operators that have no CPU kernel to fall back to: making and resizing tensors, copies, what leaves the device.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "memory.h"
#include "tensors.h"

namespace soft {

namespace {

at::Tensor EmptyMemoryFormat(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                             std::optional<c10::Device>, std::optional<bool> pin,
                             std::optional<c10::MemoryFormat> format) {
  const OwnTime own;
  TORCH_CHECK(!pin.value_or(false), "only CPU tensors can be pinned");
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::Tensor(at::detail::empty_generic(sizes, AskedAllocator(), keys, c10::dtype_or_default(dtype), format));
}
at::Tensor EmptyStrided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                        std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool> pin) {
  const OwnTime own;
  TORCH_CHECK(!pin.value_or(false), "only CPU tensors can be pinned");
  return Empty(sizes, strides, c10::dtype_or_default(dtype));
}
at::Tensor AsStrided(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                     std::optional<int64_t> offset) {
  const OwnTime own;
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}
at::Tensor View(const at::Tensor& self, c10::IntArrayRef sizes) {
  const OwnTime own;
  return at::native::view(self, sizes);
}
at::Tensor ReshapeAlias(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}
const at::Tensor& Resize(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat>) {
  int64_t count = 1;
  for (int64_t s : sizes) count *= s;
  const size_t bytes = static_cast<size_t>(count + self.storage_offset()) * self.itemsize();
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}
at::Tensor& SetStorageOffset(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef sizes,
                             c10::IntArrayRef strides) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (strides.data() == nullptr || strides.size() != sizes.size()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset);
  }
  return self;
}
at::Tensor& SetStorage(at::Tensor& self, at::Storage storage) {
  const int64_t n = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return SetStorageOffset(self, std::move(storage), 0, {n}, {});
}
at::Tensor& SetTensor(at::Tensor& self, const at::Tensor& source) {
  return SetStorageOffset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& SetNone(at::Tensor& self) { return SetTensor(self, Empty({0}, {1}, self.scalar_type())); }

// A host tensor by address: it may go while the copy is under way.
Ref ByAddress(const at::Tensor& t, bool pinned) {
  Ref r;
  r.defined = true, r.dtype = t.dtype(), r.sizes = t.sizes(), r.strides = t.strides();
  r.storage = const_cast<void*>(t.storage().data()), r.bytes = t.storage().nbytes(), r.offset = t.storage_offset();
  if (pinned) r.storage = Mirror(r.storage);
  return r;
}

PinnedBlock PinnedUnder(const at::Tensor& t) {
  return !IsOurs(t) && t.storage().data() ? PinnedBlockOf(t.storage().data()) : PinnedBlock{};
}

at::Tensor CopyFrom(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const OwnTime own;
  if (self.numel() == 0) return dst;
  const int stream = CurrentStream();
  const bool in = !IsOurs(self), out = !IsOurs(dst);
  if (in || out) Engine::Get().RefuseInCapture(stream, "a copy between host and device");
  const PinnedBlock block = PinnedUnder(in ? self : dst);
  const bool waits = (in || out) && !(non_blocking && (block.at || in));
  if (Engine::Get().pace()) {  // nothing travels: what the host reads is ones, which are finite and true
    Engine::Get().Enqueue(stream, "a copy", {}, nullptr);
    if (waits) Engine::Get().Synchronize(stream);
    if (out && block.at == nullptr) dst.fill_(1);
    return dst;
  }
  std::vector<Access> touched;
  Touch(touched, self, false);
  Touch(touched, dst, true);
  Ref from, to;
  if (!in) {
    from = RefOf(self);
  } else if (block.at) {
    from = ByAddress(self, true);
  } else {
    from.defined = true;
    from.host = self.contiguous().clone();  // staged
  }
  to = out ? ByAddress(dst, block.at != nullptr) : RefOf(dst);
  // Pinned memory is ordered like the device's: a copy in must wait for the copy out that wrote it.
  if (block.at) TouchBytes(touched, out ? dst : self, out);
  const char *begin = nullptr, *end = nullptr;
  if (block.at) begin = touched.back().begin, end = touched.back().end;
  Engine::Get().Enqueue(stream, in ? "a copy to the device" : out ? "a copy to the host" : "a copy", std::move(touched),
                        [from = std::move(from), to = std::move(to)] {
                          Alias(to).copy_(Alias(from));
                          return true;
                        });
  const bool dense = (out ? dst : self).is_non_overlapping_and_dense();
  if (block.at && dense) UsePinned(block, begin, end, out, stream);
  if (waits) Engine::Get().Synchronize(stream);
  return dst;
}
at::Tensor CopyFromAndResize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return CopyFrom(self, dst, false);
}
at::Scalar LocalScalar(const at::Tensor& self) {
  const at::Tensor host = at::Tensor(at::detail::empty_strided_cpu(self.sizes(), self.strides(), self.scalar_type()));
  CopyFrom(self, host, false);
  return host.item();
}
void RecordStream(at::Tensor& self, c10::Stream s) {
  c10::impl::getDeviceGuardImpl(c10::kPrivateUse1)->recordDataPtrOnStream(self.storage().data_ptr(), s);
}
// As the CPU's, whose draw is an operator of its own.
std::tuple<at::Tensor, at::Tensor> NativeDropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0 || !train.value_or(true))
    return {input.clone(), at::empty_like(input, input.options().dtype(at::kBool)).fill_(1)};
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)), mask};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", EmptyMemoryFormat);
  m.impl("empty_strided", EmptyStrided);
  m.impl("as_strided", AsStrided);
  m.impl("view", View);
  m.impl("_reshape_alias", ReshapeAlias);
  m.impl("resize_", Resize);
  m.impl("set_.source_Storage_storage_offset", SetStorageOffset);
  m.impl("set_.source_Storage", SetStorage);
  m.impl("set_.source_Tensor", SetTensor);
  m.impl("set_", SetNone);
  m.impl("_copy_from", CopyFrom);
  m.impl("_copy_from_and_resize", CopyFromAndResize);
  m.impl("_local_scalar_dense", LocalScalar);
  m.impl("record_stream", RecordStream);
  m.impl("native_dropout", NativeDropout);
}

}  // namespace

}  // namespace soft
