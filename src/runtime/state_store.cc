#include "runtime/state_store.h"

namespace interlace {

Result<at::Tensor> StateStore::Adopt(const std::string& name, const Geometry& geometry) {
  const auto [it, fresh] = entries_.try_emplace(name);
  Entry& entry = it->second;
  if (fresh) {
    entry.tensor = Allocate(geometry, device_, /*zero=*/true);
    entry.geometry = geometry;
  } else if (!SameSizes(entry.tensor, geometry) || !SameStrides(entry.tensor, geometry)) {
    return MakeError(name, " is ", Describe(entry.tensor), " here, the new program wants ", Describe(geometry));
  }
  entry.adopted = true;
  return entry.tensor;
}

void StateStore::BeginAdoption() {
  for (auto& [name, entry] : entries_) entry.adopted = false;
}

void StateStore::DropOthers() {
  std::erase_if(entries_, [](const auto& item) { return !item.second.adopted; });
}

int64_t StateStore::bytes() const {
  int64_t total = 0;
  for (const auto& [name, entry] : entries_) total += static_cast<int64_t>(entry.tensor.storage().nbytes());
  return total;
}

}  // namespace interlace
