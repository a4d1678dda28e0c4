// print_rule.h — the text of a rule, which parse_rule.cc reads.
#pragma once

#include <string>

#include "ir/rule.h"

namespace interlace {

void PrintRule(const UpdateRule& rule, std::string& out);

}  // namespace interlace
