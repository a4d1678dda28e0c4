// plan_json.h — plans and what is known of them as JSON, for programs that show or use them.
#pragma once

#include <string>

#include "plan/plan_text.h"

namespace interlace {
class JsonWriter;
}

namespace interlace::plan {

// Every line of the plan's file as a field, under the names of the file; stages as a list.
void WritePlan(JsonWriter& out, const PlanFile& file);
std::string PlanJson(const PlanFile& file);

}  // namespace interlace::plan
