// Host memory as a tier: pages that the count of a step's memory knows nothing of.
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <deque>

#include "tier/tier.h"

namespace interlace {

namespace {

class HostTier final : public Tier {
 public:
  ~HostTier() override {
    for (const Place& place : places_) {
      if (place.bytes > 0) munmap(place.memory, static_cast<size_t>(place.bytes));
    }
  }

  Result<Region> Reserve(const std::string& name, int64_t bytes) override {
    for (size_t i = 0; i < places_.size(); ++i) {
      if (places_[i].name == name && places_[i].bytes == bytes) return static_cast<Region>(i);
    }
    void* memory = nullptr;
    if (bytes > 0) {
      memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    if (bytes < 0 || memory == MAP_FAILED) {
      return MakeError("the host has no memory for ", name, " (", bytes, " bytes after ", reserved_,
                       "): ", std::strerror(errno));
    }
    places_.push_back({name, bytes, static_cast<char*>(memory)});
    reserved_ += bytes;
    return static_cast<Region>(places_.size() - 1);
  }

  Ticket StartWrite(Region region, const void* memory, int64_t bytes) override {
    bytes_out_ += bytes;
    if (bytes > 0) std::memcpy(places_[region].memory, memory, static_cast<size_t>(bytes));
    return ++last_;
  }
  Ticket StartRead(Region region, void* memory, int64_t bytes) override {
    bytes_in_ += bytes;
    if (bytes > 0) std::memcpy(memory, places_[region].memory, static_cast<size_t>(bytes));
    return ++last_;
  }
  Status Wait(Ticket) override { return Ok{}; }
  void* Memory(Region region) override { return places_[region].memory; }
  TierStats stats() const override {
    return {.bytes_out = bytes_out_, .bytes_in = bytes_in_, .reserved_bytes = reserved_};
  }

 private:
  struct Place {
    std::string name;
    int64_t bytes = 0;
    char* memory = nullptr;
  };
  std::deque<Place> places_;
  Ticket last_ = 0;
  int64_t reserved_ = 0, bytes_out_ = 0, bytes_in_ = 0;
};

}  // namespace

std::unique_ptr<Tier> MakeHostTier() {
  return std::make_unique<HostTier>();
}

}  // namespace interlace
