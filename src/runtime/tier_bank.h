// tier_bank.h — the storages of one program that go out and come back, and what is under way.
//
// A read that fails leaves the storage out, so that what lay in it is missed again, and damage is never written back as
// if it were sound.
//
// A storage that is out keeps its StorageImpl, without memory: every tensor over it, made before or after, sees the new
// memory once it is back. So nothing else in the runtime knows that storages move.
#pragma once

#include <c10/core/Storage.h>

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "ir/program.h"
#include "tier/host_lane.h"
#include "tier/tier.h"

namespace interlace {

class TierBank {
 public:
  // `tier` may be nullptr: then Add is an error. Banks of one tier with the same `prefix` share the places of equal
  // names.
  TierBank(std::shared_ptr<Tier> tier, c10::Device device, std::string prefix = {})
      : tier_(std::move(tier)), device_(device), prefix_(std::move(prefix)) {}
  ~TierBank() { (void)Drain(); }
  TierBank(const TierBank&) = delete;
  TierBank& operator=(const TierBank&) = delete;

  // Reserves a place for the storage of a root. `copied`: its bytes go there; else its memory only goes and comes, and
  // what comes is zeros. Error: there is no tier, or no room in it.
  Status Add(ValueId root, const std::string& name, int64_t bytes, bool copied = true);
  bool Has(ValueId root) const { return places_.contains(root); }

  // The four ops. `storage` is the root's; it may be freed or used only as docs/ir.md says.
  Status StartOut(ValueId root, const c10::Storage& storage, bool clean);  // clean: the tier has these bytes
  Status FinishOut(ValueId root, const c10::Storage& storage);
  Status StartIn(ValueId root, const c10::Storage& storage, bool fresh = false);  // fresh: memory alone, no bytes
  Status FinishIn(ValueId root);
  // Whole moves at once, for those who come between steps.
  Status Out(ValueId root, const c10::Storage& storage);
  Status In(ValueId root, const c10::Storage& storage);
  // The bytes of a storage that is out; nullptr: the tier is no memory.
  void* Memory(ValueId root) { return tier_->Memory(places_.at(root).region); }
  // Runs on the host lane (it may throw), once what goes out of these roots has arrived; moves of them wait for it.
  void StartStep(const std::vector<ValueId>& roots, std::function<void()> job);
  // Waits for all that is under way; the first failure.
  Status Drain();

  const std::shared_ptr<Tier>& tier() const { return tier_; }
  const std::string& prefix() const { return prefix_; }

 private:
  struct Place {
    std::string name;
    int64_t bytes = 0;
    Tier::Region region = -1;   // -1: no bytes are kept
    Tier::Ticket ticket = 0;    // under way, or 0
    HostLane::Ticket step = 0;  // the last on the host that changes its bytes
    c10::Storage coming;        // of a read that is under way
  };
  Status Finish(Place& place);
  std::shared_ptr<Tier> tier_;
  c10::Device device_;
  std::string prefix_;
  std::unordered_map<ValueId, Place> places_;
  HostLane host_;  // last: its jobs end before what they work on
};

// A storage of `bytes` that is out: it has no memory.
c10::Storage EmptyStorage(c10::Device device);
inline bool IsOut(const c10::Storage& storage, int64_t bytes) {
  return bytes > 0 && storage.nbytes() == 0;
}

}  // namespace interlace
