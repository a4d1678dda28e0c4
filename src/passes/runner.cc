#include "passes/runner.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#include "ir/program.h"
#include "ir/text.h"
#include "ir/verifier.h"
#include "passes/pass_table.h"
#include "passes/reposition_update.h"
#include "passes/search.h"

namespace interlace {
namespace {

int64_t CountOps(const Program& program) {
  int64_t ops = 0;
  for (const Phase& phase : program.phases) ops += static_cast<int64_t>(phase.ops.size());
  return ops;
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

}  // namespace

// What a captured program does not have yet.
static bool MovesTransfers(std::string_view pass) {
  return pass == "bucket" || pass == "prefetch" || pass == "unshard" || pass == "reorder" || pass == "overlap_update";
}

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
  // A search that also decides what runs again and side by side goes back to the captured program and the passes since.
  std::optional<Program> captured;
  size_t since = 0;
  const auto repeats = [](const PassCall& c) { return c.pass->name == "search" && RepeatsSearch(c.options); };
  const bool will_search = std::any_of(calls.begin(), calls.end(), repeats);
  for (size_t i = 0; i < calls.size(); ++i) {
    const PassCall& call = calls[i];
    Program before;
    if (!ReproFile(options).empty()) before = work.Clone();
    if (will_search && work.level == Level::kCaptured && work.width == 1) {
      captured = work.Clone();
      since = i;
    }
    auto start = std::chrono::steady_clock::now();
    Result<bool> changed = true;
    if (const Status fits = CheckRepositioned(work, call.pass->name); !fits.ok()) {
      changed = fits.error();
    } else if (work.level == Level::kCaptured && MovesTransfers(call.pass->name)) {
      changed = MakeError("the program has no units; run shard, replicate or zero1 before ", call.pass->name);
    } else if (repeats(call) && captured && work.level != Level::kCaptured) {
      const std::vector<PassCall> between(calls.begin() + static_cast<ptrdiff_t>(since),
                                          calls.begin() + static_cast<ptrdiff_t>(i));
      Result<SearchResult> found = SearchCaptured(*captured, between, call.options, work);
      if (!found.ok()) changed = found.error();
    } else {
      changed = call.pass->run(work, call.options);
    }
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

Status RunUnverified(Program& program, const std::string& passes) {
  if (passes.empty()) return Ok{};
  INTERLACE_ASSIGN(std::vector<PassCall> calls, ParsePipeline(passes));
  RunOptions run;
  run.verify = false;
  run.uses_up = true;
  Result<std::vector<PassReport>> reports = RunPasses(program, calls, run);
  if (!reports.ok()) return reports.error();
  return Ok{};
}

Result<std::string> ReadFile(const std::string& path) {
  std::error_code code;
  if (std::filesystem::is_directory(path, code)) return MakeError("cannot read ", path, ": is a directory");
  std::ifstream in(path, std::ios::binary);
  if (!in) return MakeError("cannot read ", path, ": ", std::strerror(errno));
  std::ostringstream text;
  text << in.rdbuf();
  if (in.bad()) return MakeError("cannot read ", path, ": ", std::strerror(errno));
  return std::move(text).str();
}

Status WriteFile(const std::string& path, std::string_view text) {
  // Devices and pipes cannot be renamed onto.
  std::error_code code;
  bool plain = !std::filesystem::exists(path, code) || std::filesystem::is_regular_file(path, code);
  std::string target = plain ? path + ".part" : path;
  {
    std::ofstream out(target, std::ios::binary | std::ios::trunc);
    if (out) out.write(text.data(), static_cast<std::streamsize>(text.size()));
    if (out) out.flush();
    if (!out) {
      Error error = MakeError("cannot write ", path, ": ", std::strerror(errno));
      if (plain) std::remove(target.c_str());
      return error;
    }
  }
  if (plain) {
    std::filesystem::rename(target, path, code);
    if (code) return MakeError("cannot write ", path, ": ", code.message());
  }
  return Ok{};
}

}  // namespace interlace
