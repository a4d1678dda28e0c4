#include "runtime/tier_bank.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>

#include "runtime/step_heap.h"
#include "runtime/step_scope.h"

namespace interlace {

namespace {

void TakeMemory(const c10::Storage& storage, c10::Device device) {
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, device));
  storage.set_nbytes(0);
}

}  // namespace

c10::Storage EmptyStorage(c10::Device device) {
  return c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device),
                      c10::GetAllocator(device.type()),
                      /*resizable=*/false);
}

Status TierBank::Add(ValueId root, const std::string& name, int64_t bytes, bool copied) {
  if (copied && tier_ == nullptr) {
    return MakeError(name, " goes out of memory in this program, but there is no tier to hold it; give a folder on a ",
                     "local disk with tier=");
  }
  Place& place = places_[root];
  place.name = name;
  place.bytes = bytes;
  if (!copied) return Ok{};
  INTERLACE_ASSIGN(place.region, tier_->Reserve(prefix_ + name, bytes));
  return Ok{};
}

Status TierBank::StartOut(ValueId root, const c10::Storage& storage, bool clean) {
  Place& place = places_.at(root);
  if (clean || place.region < 0) return Ok{};
  INTERLACE_TRY(host_.Wait(place.step));
  place.ticket = tier_->StartWrite(place.region, storage.data(), place.bytes);
  return Ok{};
}

Status TierBank::FinishOut(ValueId root, const c10::Storage& storage) {
  Place& place = places_.at(root);
  INTERLACE_TRY(Finish(place));
  TakeMemory(storage, device_);
  return Ok{};
}

Status TierBank::Finish(Place& place) {
  if (place.ticket == 0) return Ok{};  // Drain has waited for it
  Status status = tier_->Wait(std::exchange(place.ticket, 0));
  const c10::Storage coming = std::exchange(place.coming, {});
  if (!status.ok() && coming) TakeMemory(coming, device_);
  return status;
}

Status TierBank::StartIn(ValueId root, const c10::Storage& storage, bool fresh) {
  Place& place = places_.at(root);
  if (!fresh) INTERLACE_TRY(host_.Wait(place.step));
  const bool paged = device_.is_cpu() && place.bytes >= PageHeap::kLeast;
  storage.set_data_ptr_noswap(paged ? StepHeap::Allocate(place.bytes)
                                    : c10::GetAllocator(device_.type())->allocate(static_cast<size_t>(place.bytes)));
  storage.set_nbytes(static_cast<size_t>(place.bytes));
  if (fresh) return Ok{};
  if (place.region < 0) {
    if (place.bytes == 0) return Ok{};
    at::from_blob(storage.mutable_data(), {place.bytes}, at::TensorOptions().dtype(at::kByte).device(device_)).zero_();
    return Ok{};
  }
  place.coming = storage;
  place.ticket = tier_->StartRead(place.region, storage.mutable_data(), place.bytes);
  return Ok{};
}

void TierBank::StartStep(const std::vector<ValueId>& roots, std::function<void()> job) {
  std::vector<Tier::Region> regions;
  for (ValueId root : roots) regions.push_back(places_.at(root).region);
  const HostLane::Ticket ticket =
      host_.Start([tier = tier_, regions = std::move(regions), job = std::move(job)]() -> Status {
        for (Tier::Region region : regions) tier->AwaitCopies(region);
        try {
          const StepScope scope{c10::Device(c10::kCPU)};
          job();
        } catch (const std::exception& error) {
          return MakeError(MessageOf(error));
        }
        return Ok{};
      });
  for (ValueId root : roots) places_.at(root).step = ticket;
}

Status TierBank::FinishIn(ValueId root) {
  return Finish(places_.at(root));
}

Status TierBank::Out(ValueId root, const c10::Storage& storage) {
  INTERLACE_TRY(StartOut(root, storage, /*clean=*/false));
  return FinishOut(root, storage);
}

Status TierBank::In(ValueId root, const c10::Storage& storage) {
  INTERLACE_TRY(StartIn(root, storage));
  return FinishIn(root);
}

Status TierBank::Drain() {
  Status first = host_.WaitAll();
  for (auto& [root, place] : places_) {
    Status status = Finish(place);
    if (first.ok()) first = std::move(status);
  }
  return first;
}

}  // namespace interlace
