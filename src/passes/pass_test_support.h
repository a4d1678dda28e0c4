// pass_test_support.h — a pass test is two texts: before and after. For tests only.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "base/files.h"
#include "ir/testing/golden.h"
#include "ir/program.h"
#include "ir/text.h"
#include "passes/pipeline.h"
#include "passes/runner.h"

namespace interlace {

// The text after the pipeline (verified after every pass), or "error: ..." with the message's first line.
inline std::string RunText(const std::string& text, const std::string& pipeline) {
  auto fail = [](const Error& error) { return "error: " + error.message.substr(0, error.message.find('\n')); };
  Result<Program> program = Parse(text, "test");
  if (!program.ok()) return "error: " + program.error().ToString();
  Result<std::vector<PassCall>> calls = ParsePipeline(pipeline);
  if (!calls.ok()) return fail(calls.error());
  Result<std::vector<PassReport>> reports = RunPasses(*program, *calls);
  return reports.ok() ? Print(*program) : fail(reports.error());
}

// Runs a pipeline that is written rightly on a program in memory.
inline Status Apply(Program& program, const std::string& pipeline) {
  Result<std::vector<PassReport>> reports = RunPasses(program, *ParsePipeline(pipeline));
  if (!reports.ok()) return reports.error();
  return Ok{};
}

// The lines of the phases only, without what declares things.
inline std::string Phases(const std::string& text) {
  size_t at = text.find("\nphase ");
  return at == std::string::npos ? text : text.substr(at + 1);
}

// Compares with tests/golden/passes/NAME. Read the diff in review.
inline void ExpectGolden(const std::string& name, const std::string& actual) {
  testing::ExpectGolden("passes/" + name, actual);
}

// tests/golden/passes/NAME as text.
inline std::string GoldenInput(const std::string& name) {
  Result<std::string> text = ReadFile(std::string(INTERLACE_SOURCE_DIR) + "/tests/golden/passes/" + name);
  return text.ok() ? *text : "no such file: " + name;
}

}  // namespace interlace
