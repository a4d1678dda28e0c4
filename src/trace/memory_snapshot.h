// memory_snapshot.h — memory events as the dictionary of torch.cuda.memory._snapshot(), in JSON.
//
// Python pickles the loaded dictionary and torch.cuda._memory_viz (or pytorch.org/memory_viz) shows it. Each rank has
// up to two segments: one for the arena, whose storages have the planned addresses, and one for all others, which get
// theirs by best fit as an allocator would give them. A storage is a device_trace entry "alloc" and later
// "free_requested" and "free_completed", with one frame that names op, module and source line.
#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "trace/timeline.h"

namespace interlace {

// `events` in the order they happened. Error: an end without a beginning, a storage that begins twice, one in the arena
// where another lives, addresses beyond 64 bits.
Result<std::string> WriteMemorySnapshot(const std::vector<MemoryEvent>& events);

}  // namespace interlace
