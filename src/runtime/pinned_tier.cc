// Pinned host memory: copies run on the stream that is current when they start (stream.h), and so do the frees and uses
// of what lies on the device that come after them: the order of the streams is the wait. Between copies out and in of
// one region, whichever streams they are on, each waits for the last of the other kind.
#include "runtime/pinned_tier.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <deque>
#include <optional>

namespace interlace {

namespace {

class PinnedTier final : public Tier {
 public:
  explicit PinnedTier(c10::Device device) : device_(device) {}

  Result<Region> Reserve(const std::string& name, int64_t bytes) override {
    for (size_t i = 0; i < places_.size(); ++i) {
      if (places_[i].name == name && places_[i].memory.nbytes() == static_cast<size_t>(bytes))
        return static_cast<Region>(i);
    }
    try {
      at::Tensor memory = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
      memory.zero_();
      places_.push_back({name, std::move(memory), {}, {}});
    } catch (const std::exception& error) {
      return MakeError("the host has no memory for ", name, " (", bytes, " bytes after ", reserved_,
                       "): ", error.what());
    }
    reserved_ += bytes;
    return static_cast<Region>(places_.size() - 1);
  }

  Ticket StartWrite(Region region, const void* memory, int64_t bytes) override {
    if (bytes == 0) return ++last_;
    bytes_out_ += bytes;
    Place& place = places_[region];
    Await(place.written);
    Await(place.read);
    place.memory.copy_(OnDevice(const_cast<void*>(memory), bytes), /*non_blocking=*/true);
    Mark(place.written);
    return ++last_;
  }
  Ticket StartRead(Region region, void* memory, int64_t bytes) override {
    if (bytes == 0) return ++last_;
    bytes_in_ += bytes;
    Place& place = places_[region];
    Await(place.written);
    OnDevice(memory, bytes).copy_(place.memory, /*non_blocking=*/true);
    Mark(place.read);
    return ++last_;
  }
  Status Wait(Ticket) override { return Ok{}; }
  void* Memory(Region region) override { return places_[region].memory.mutable_data_ptr(); }
  void AwaitCopies(Region region) override {
    const Place& place = places_[region];
    if (place.written) place.written->synchronize();
    if (place.read) place.read->synchronize();
  }
  TierStats stats() const override {
    return {.bytes_out = bytes_out_, .bytes_in = bytes_in_, .reserved_bytes = reserved_};
  }

 private:
  struct Place {
    std::string name;
    at::Tensor memory;
    std::optional<c10::Event> written, read;  // of the last copies out and in
  };
  c10::Stream Current() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }
  void Await(std::optional<c10::Event>& event) const {
    if (event) event->block(Current());
  }
  void Mark(std::optional<c10::Event>& event) const { event.emplace(device_.type()).record(Current()); }
  at::Tensor OnDevice(void* memory, int64_t bytes) const {
    return at::from_blob(memory, {bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
  }

  c10::Device device_;
  std::deque<Place> places_;
  Ticket last_ = 0;
  int64_t reserved_ = 0, bytes_out_ = 0, bytes_in_ = 0;
};

}  // namespace

Result<std::unique_ptr<Tier>> MakeTier(const TierOptions& options, c10::Device device) {
  if (!device.is_cpu()) return std::unique_ptr<Tier>(std::make_unique<PinnedTier>(device));
  if (options.folder == "host") return MakeHostTier();
  if (!options.folder.empty()) return MakeFileTier(options);
  return std::unique_ptr<Tier>();
}

}  // namespace interlace
