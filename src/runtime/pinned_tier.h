// pinned_tier.h — the tier of a device: the room tier's own beside a CPU, pinned host memory beside an accelerator.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "base/result.h"
#include "tier/tier.h"

namespace interlace {

// Host memory where "host" is given, and on an accelerator; the file tier where a folder is given; nullptr when there
// is neither.
Result<std::unique_ptr<Tier>> MakeTier(const TierOptions& options, c10::Device device);

}  // namespace interlace
