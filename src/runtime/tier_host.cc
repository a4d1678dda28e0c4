// Pinned host memory as a tier. Copies run on the lane's own stream (stream.h), and so do the frees and uses that come
// after them: the order of the streams is the wait.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <deque>

#include "runtime/tier.h"

namespace interlace {

namespace {

class HostTier final : public Tier {
 public:
  explicit HostTier(c10::Device device) : device_(device) {}

  Result<Region> Reserve(const std::string& name, int64_t bytes) override {
    for (size_t i = 0; i < places_.size(); ++i) {
      if (places_[i].name == name && places_[i].memory.nbytes() == static_cast<size_t>(bytes)) return static_cast<Region>(i);
    }
    try {
      Place& place = places_.emplace_back();
      place.name = name;
      place.memory = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
      place.memory.zero_();
    } catch (const std::exception& error) {
      places_.pop_back();
      return MakeError("the host has no pinned memory for ", name, " (", bytes, " bytes after ", reserved_, "): ", error.what());
    }
    reserved_ += bytes;
    return static_cast<Region>(places_.size() - 1);
  }

  Ticket StartWrite(Region region, const void* memory, int64_t bytes) override {
    bytes_out_ += bytes;
    return Copy(places_[region].memory, OnDevice(const_cast<void*>(memory), bytes));
  }
  Ticket StartRead(Region region, void* memory, int64_t bytes) override {
    bytes_in_ += bytes;
    return Copy(OnDevice(memory, bytes), places_[region].memory);
  }
  Status Wait(Ticket) override { return Ok{}; }
  TierStats stats() const override {
    return {.bytes_out = bytes_out_, .bytes_in = bytes_in_, .reserved_bytes = reserved_};
  }

 private:
  struct Place {
    std::string name;
    at::Tensor memory;
  };
  at::Tensor OnDevice(void* memory, int64_t bytes) const {
    return at::from_blob(memory, {bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
  }
  Ticket Copy(const at::Tensor& to, const at::Tensor& from) {
    to.copy_(from, /*non_blocking=*/true);
    return ++last_;
  }

  c10::Device device_;
  std::deque<Place> places_;
  Ticket last_ = 0;
  int64_t reserved_ = 0, bytes_out_ = 0, bytes_in_ = 0;
};

}  // namespace

Result<std::unique_ptr<Tier>> MakeHostTier(c10::Device device) {
  if (device.is_cpu()) return MakeError("host memory is no tier beside a CPU: give a folder");
  return std::unique_ptr<Tier>(std::make_unique<HostTier>(device));
}

Result<std::unique_ptr<Tier>> MakeTier(const TierOptions& options, c10::Device device) {
  if (!options.folder.empty() && device.is_cpu()) return MakeFileTier(options);
  if (!device.is_cpu()) return MakeHostTier(device);
  return std::unique_ptr<Tier>();
}

}  // namespace interlace
