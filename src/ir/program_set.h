// program_set.h — the stages of a pipeline: a program each, named with its digest in one file.
//
//   interlace-set 1
//   axis pp
//   stage 0 "stage0.il" digest "0a1c..."
//   stage 1 "stage1.il" digest "77f0..."
//
// All have the same mesh, and as many stages as the axis has ranks: those with index s along it run stage s. What one
// stage hands to another are messages along that axis (send, recv); the k-th recv.start from a stage takes the k-th
// send.start there.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "ir/program.h"

namespace interlace {

struct Stage {
  std::string file;  // beside the set's own
  Program program;
};
struct ProgramSet {
  std::string axis;
  std::vector<Stage> stages;
};

// `read` gives the text of a stage's file. Error: with file, line and column of the set or of a stage; a file that has
// another digest.
using ReadText = std::function<Result<std::string>(const std::string& file)>;
Result<ProgramSet> ParseProgramSet(std::string_view text, std::string_view file, const ReadText& read);
// The set of a file, whose stages' files lie beside it.
Result<ProgramSet> ReadProgramSet(const std::string& path);
// The set's own text, with the digests of the printed programs.
std::string PrintProgramSet(const ProgramSet& set);

// Each program is valid and they fit: one mesh and number of micro-batches, every send has its recv of the same type
// and the other way round, no stage is without messages, all meet in the same collectives along the axis, and no stages
// wait for one another for ever (a wait for a message needs both ends started). Error: the stage, its line, and what to
// write instead.
Status CheckProgramSet(const ProgramSet& set);

}  // namespace interlace
