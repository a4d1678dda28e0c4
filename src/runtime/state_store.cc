#include "runtime/state_store.h"

#include "runtime/tier_bank.h"

namespace interlace {

std::string StateKey(const State& state) {
  return state.unit == kNone ? "state " + state.role : "state u" + std::to_string(state.unit) + "." + state.role;
}

void StateStore::TakeOver(const StateStore& donor) {
  entries_ = donor.entries_;
  for (auto& [name, entry] : entries_) entry.adopted = false;
  taken_over_ = true;
}

Result<at::Tensor> StateStore::Adopt(const std::string& name, const Geometry& geometry, bool persistent, bool out) {
  const auto [it, fresh] = entries_.try_emplace(name);
  Entry& entry = it->second;
  if (fresh && persistent && taken_over_) {
    return MakeError(name, " is not in the program that runs now: only a program with the same units and states, from ",
                     "the same capture and strategy, can go on with its values; compile again for another one");
  }
  const bool same = !fresh && SameSizes(entry.tensor, geometry) && SameStrides(entry.tensor, geometry) &&
                    entry.geometry.dtype == geometry.dtype;
  if (fresh || (!same && !persistent && !entry.persistent)) {
    entry.tensor = out ? MakeView(EmptyStorage(device_), geometry) : Allocate(geometry, device_, /*zero=*/true);
    entry.geometry = geometry;
  } else if (!same) {
    return MakeError(name, " is ", Describe(entry.tensor), " here, the new program wants ", Describe(geometry),
                     "; compile again for another layout");
  }
  entry.persistent = persistent;
  entry.adopted = true;
  return entry.tensor;
}

Status StateStore::DropOthers() {
  for (const auto& [name, entry] : entries_) {
    if (entry.persistent && !entry.adopted) {
      return MakeError("the new program has no ", name, ", whose values would be lost: only a program with the same ",
                       "units and states, from the same capture and strategy, can go on");
    }
  }
  std::erase_if(entries_, [](const auto& item) { return !item.second.adopted; });
  return Ok{};
}

int64_t StateStore::bytes() const {
  int64_t total = 0;
  for (const auto& [name, entry] : entries_) total += static_cast<int64_t>(entry.tensor.storage().nbytes());
  return total;
}

}  // namespace interlace
