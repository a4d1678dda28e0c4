// timeline_json.h — a timeline as JSON that keeps every field, so that ranks can send theirs to the one that writes the
// file.
#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "trace/timeline.h"

namespace interlace {

std::string WriteTimelineJson(const Timeline& timeline);
// Timelines of different ranks as one. Error: not what WriteTimelineJson writes; nothing to merge.
Result<Timeline> MergeTimelineJson(const std::vector<std::string>& parts);

}  // namespace interlace
