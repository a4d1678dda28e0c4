// tier_folder.h — the files of a tier in its folder: `interlace-tier-RANK.data`, and a lock beside it that says whose
// it is. A run that is killed leaves its files; the next one takes the place of those with its own ranks' names, and
// removes the others.
#pragma once

#include "base/result.h"
#include "tier/file_worker.h"
#include "tier/tier.h"

namespace interlace {

// Locks the folder for this rank and makes an empty file there. `file.path` is set once there is one to remove. Error:
// no such folder, not writable, in use by another run.
Status OpenTierFile(const TierOptions& options, File& lock, TierFile& file);

}  // namespace interlace
