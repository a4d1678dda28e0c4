// write_model.h — a model's layers as text, for tests and fuzzing: what ReadModelText reads. The files themselves are
// written where models are captured (python/interlace/plan).
#pragma once

#include <string>

#include "plan/model_text.h"

namespace interlace::plan {

std::string WriteModelText(const ModelText& model);

}  // namespace interlace::plan
