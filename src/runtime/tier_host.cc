// Host memory as a tier. On an accelerator it is pinned, and copies run on the lane's own stream (stream.h), and so do
// the frees and uses that come after them: the order of the streams is the wait.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <optional>

#include "runtime/tier.h"

namespace interlace {

namespace {

// Zeros that torch's allocator, and so the count of a step's memory, knows nothing of.
at::Tensor Pages(int64_t bytes) {
  void* const memory =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, std::strerror(errno));
  return at::from_blob(
      memory, {bytes}, [bytes](void* pages) { munmap(pages, static_cast<size_t>(bytes)); },
      at::TensorOptions().dtype(at::kByte));
}

class HostTier final : public Tier {
 public:
  explicit HostTier(c10::Device device) : device_(device) {}

  Result<Region> Reserve(const std::string& name, int64_t bytes) override {
    for (size_t i = 0; i < places_.size(); ++i) {
      if (places_[i].name == name && places_[i].memory.nbytes() == static_cast<size_t>(bytes))
        return static_cast<Region>(i);
    }
    try {
      Place& place = places_.emplace_back();
      place.name = name;
      if (device_.is_cpu()) {
        place.memory = Pages(bytes);
      } else {
        place.memory = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
        place.memory.zero_();
      }
    } catch (const std::exception& error) {
      places_.pop_back();
      return MakeError("the host has no memory for ", name, " (", bytes, " bytes after ", reserved_,
                       "): ", error.what());
    }
    reserved_ += bytes;
    return static_cast<Region>(places_.size() - 1);
  }

  Ticket StartWrite(Region region, const void* memory, int64_t bytes) override {
    bytes_out_ += bytes;
    Place& place = places_[region];
    const Ticket ticket = Copy(place.memory, OnDevice(const_cast<void*>(memory), bytes));
    if (!device_.is_cpu()) {
      place.written.emplace(device_.type());
      place.written->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    }
    return ticket;
  }
  Ticket StartRead(Region region, void* memory, int64_t bytes) override {
    bytes_in_ += bytes;
    return Copy(OnDevice(memory, bytes), places_[region].memory);
  }
  Status Wait(Ticket) override { return Ok{}; }
  void* Memory(Region region) override { return places_[region].memory.mutable_data_ptr(); }
  void AwaitWrites(Region region) override {
    if (places_[region].written) places_[region].written->synchronize();
  }
  TierStats stats() const override {
    return {.bytes_out = bytes_out_, .bytes_in = bytes_in_, .reserved_bytes = reserved_};
  }

 private:
  struct Place {
    std::string name;
    at::Tensor memory;
    std::optional<c10::Event> written;  // of the last copy out, on an accelerator
  };
  at::Tensor OnDevice(void* memory, int64_t bytes) const {
    return at::from_blob(memory, {bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
  }
  Ticket Copy(const at::Tensor& to, const at::Tensor& from) {
    if (device_.is_cpu()) {
      std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), static_cast<size_t>(from.numel()));
    } else {
      to.copy_(from, /*non_blocking=*/true);
    }
    return ++last_;
  }

  c10::Device device_;
  std::deque<Place> places_;
  Ticket last_ = 0;
  int64_t reserved_ = 0, bytes_out_ = 0, bytes_in_ = 0;
};

}  // namespace

Result<std::unique_ptr<Tier>> MakeHostTier(c10::Device device) {
  return std::unique_ptr<Tier>(std::make_unique<HostTier>(device));
}

Result<std::unique_ptr<Tier>> MakeTier(const TierOptions& options, c10::Device device) {
  if (!options.folder.empty() && options.folder != "host" && device.is_cpu()) return MakeFileTier(options);
  if (!device.is_cpu() || options.folder == "host") return MakeHostTier(device);
  return std::unique_ptr<Tier>();
}

}  // namespace interlace
