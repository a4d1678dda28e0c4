#include "passes/runner.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>

#include "base/files.h"
#include "ir/pending.h"
#include "ir/program.h"
#include "ir/text.h"
#include "ir/verifier.h"
#include "passes/pass_table.h"

namespace interlace {
namespace {

int64_t CountOps(const Program& program) {
  int64_t ops = 0;
  for (const Phase& phase : program.phases) ops += static_cast<int64_t>(phase.ops.size());
  return ops;
}

bool IsCut(const Program& program) {
  return std::any_of(program.params.begin(), program.params.end(), [](const Param& p) { return !p.cuts.empty(); });
}

// Whether it is one stage's, or says of its ops which stage they are of.
bool HasStages(const Program& program) {
  return program.stage.has_value() || program.Meta("stages.at") != nullptr;
}

Status Dump(const Program& program, const std::string& dir, size_t index, std::string_view name) {
  if (dir.empty()) return Ok{};
  std::string path = dir;
  path.append(index < 10 ? "/0" : "/").append(std::to_string(index)).append("-").append(name).append(".il");
  return WriteFile(path, Print(program));
}

// Empty: none is written.
std::string ReproFile(const RunOptions& options) {
  if (!options.repro_file.empty()) return options.repro_file;
  return options.dump_dir.empty() ? "" : options.dump_dir + "/repro.il";
}

// Writes the repro file and says so at the end of the message.
Error WithRepro(Error error, const Program& before, const std::vector<PassCall>& calls, size_t failed,
                const RunOptions& options) {
  const std::string path = ReproFile(options);
  if (path.empty()) return error;
  std::string command = "interlace-opt --verify '--passes=" + PrintPipeline(calls, failed) + "' " + path;
  Status written = WriteFile(path, std::string("# ").append(command).append("\n").append(Print(before)));
  error.message +=
      written.ok() ? "\nrun again with: " + command : "\n(no repro file: " + written.error().ToString() + ")";
  return error;
}

// Whether the program is what the pass works on, by its row in the table.
Status CheckTakes(const PassInfo& pass, const Program& program) {
  const bool captured = program.level == Level::kCaptured && program.units.empty();
  if (pass.takes == Takes::kCaptured && !captured)
    return MakeError("the program has units already (shard, replicate or zero1 has run); ", pass.name,
                     " takes a captured one");
  if ((pass.takes == Takes::kUnits || pass.takes == Takes::kNumbers) && program.level == Level::kCaptured)
    return MakeError("the program has no units; run shard, replicate or zero1 before ", pass.name);
  if (pass.takes == Takes::kNumbers && program.level == Level::kSharded)
    return MakeError("the program has sizes that are not numbers, or no update; bind them, or run update, before ",
                     pass.name);
  if (pass.keeps_pending || PendingOps(program).empty()) return Ok{};
  return MakeError("the optimizer step of each unit stands just before the unit's first use (reposition_update), and ",
                   pass.name, " does not keep that order; run reposition_update after ", pass.name);
}

}  // namespace

Result<std::vector<PassReport>> RunPasses(Program& program, const std::vector<PassCall>& calls,
                                          const RunOptions& options) {
  if (options.verify) {
    Status valid = Verify(program);
    if (!valid.ok()) return Error{"the input is not valid: " + valid.error().message, valid.error().where};
  }
  if (!options.dump_dir.empty()) {
    std::error_code code;
    std::filesystem::create_directories(options.dump_dir, code);
    if (code) return MakeError("cannot make the folder ", options.dump_dir, ": ", code.message());
    INTERLACE_TRY(Dump(program, options.dump_dir, 0, "input"));
  }
  std::vector<PassReport> reports;
  Program work = options.uses_up ? std::move(program) : program.Clone();
  // What a pass further on goes back to: the last captured program that every rank has whole, and the passes since.
  std::optional<Program> captured;
  size_t since = 0;
  const auto goes_back = [](const PassCall& c) { return c.pass->goes_back != nullptr && c.pass->goes_back(c.options); };
  const bool will_go_back = std::any_of(calls.begin(), calls.end(), goes_back);
  for (size_t i = 0; i < calls.size(); ++i) {
    const PassCall& call = calls[i];
    Program before;
    if (!ReproFile(options).empty()) before = work.Clone();
    if (will_go_back && work.level == Level::kCaptured && work.width == 1 && !IsCut(work) && !HasStages(work)) {
      captured = work.Clone();
      since = i;
    }
    auto start = std::chrono::steady_clock::now();
    const auto run = [&]() -> Result<bool> {
      INTERLACE_TRY(CheckTakes(*call.pass, work));
      if (!goes_back(call) || !captured) return call.pass->run(work, call.options);
      const Origin origin{*captured,
                          {calls.begin() + static_cast<ptrdiff_t>(since), calls.begin() + static_cast<ptrdiff_t>(i)}};
      return call.pass->run_again(work, origin, call.options);
    };
    const Result<bool> changed = run();
    if (!changed.ok()) {
      Error error{"pass '" + std::string(call.pass->name) + "': " + changed.error().message, changed.error().where};
      return WithRepro(std::move(error), before, calls, i, options);
    }
    if (*changed) work.Compact();
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    reports.push_back({PrintPass(call), seconds, *changed, CountOps(work)});
    INTERLACE_TRY(Dump(work, options.dump_dir, i + 1, call.pass->name));
    if (options.verify && *changed) {
      Status valid = Verify(work);
      if (!valid.ok()) {
        Error error{"pass '" + std::string(call.pass->name) + "' left an invalid program: " + valid.error().message,
                    valid.error().where};
        return WithRepro(std::move(error), before, calls, i, options);
      }
    }
  }
  program = std::move(work);
  return reports;
}

Status RunUnverified(Program& program, const std::vector<PassCall>& calls) {
  if (calls.empty()) return Ok{};
  Result<std::vector<PassReport>> reports = RunPasses(program, calls, {.verify = false, .uses_up = true});
  if (!reports.ok()) return reports.error();
  return Ok{};
}

}  // namespace interlace
