// interlace-sim — predicts a step: program and cluster in; a summary, JSON, a trace or a memory snapshot out. Exit
// codes: 0 fine, 1 the program, cluster or profile says no, 2 wrong command line.
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/command_line.h"
#include "base/files.h"
#include "base/scan.h"
#include "ir/text.h"
#include "ir/verifier.h"
#include "sim/simulate.h"
#include "sim/simulate_set.h"
#include "trace/chrome_trace.h"

namespace interlace {
namespace {

constexpr std::string_view kHelp = R"(interlace-sim [options] PROGRAM|-
interlace-sim [options] --set SET

Predicts the time and memory of one step of a scheduled program (docs/ir.md) on a cluster (docs/cost_model.md), or of a
pipeline whose stages are programs of a set.

  --set SET            a file that names the stages of a pipeline: all of them together
  --cluster C          a cluster file (TOML), or a preset with a number of devices: h100-80gb-32, a100-40gb-8, l4-24gb-4, local-2
  --profile FILE       times measured on the real machine; what is not in it is estimated
  --machine TEXT       fingerprint that the profile must have
  --foreign            use a profile of another machine, and say so in the result
  --slow RANK=FACTOR   this rank computes FACTOR times slower; may be given several times
  --every-rank         simulate every rank although they are alike
  --output WHAT        print the result as summary (the default), json or trace
  --json               the same as --output json
  --trace FILE         write a trace for Perfetto, chrome://tracing and the tools of PyTorch's profiler
  --snapshot FILE      write the memory history in the form of torch.cuda.memory._snapshot(), as JSON
  --show-cluster NAME  print a preset, to save and edit
  --help               this text

Examples:
  interlace-sim program.il --cluster h100-80gb-32
  interlace-sim program.il --cluster local-2 --profile here.profile --json
  interlace-sim program.il --cluster a100-40gb-8 --slow 3=1.2 --trace step.json
  interlace-sim --set gpt.set --cluster h100-80gb-32 --trace gpt.json
  interlace-sim --show-cluster l4-24gb-8 > mine.toml; interlace-sim program.il --cluster mine.toml
  interlace-opt --bind b=1,s=2048 graph.il | interlace-sim - --cluster local-1

Exit codes: 0 fine, 1 the program, cluster or profile says no, 2 wrong command line.
)";

struct Flags {
  std::string input, set, cluster, profile, machine, trace, snapshot, show_cluster, output;
  std::vector<std::string> slow;
  bool foreign = false, every_rank = false, json = false, help = false;
};

Status Read(const std::vector<std::string>& args, Flags& flags) {
  return ReadFlags(args,
                   {{"--set", &flags.set},
                    {"--cluster", &flags.cluster},
                    {"--output", &flags.output},
                    {"--profile", &flags.profile},
                    {"--machine", &flags.machine},
                    {"--trace", &flags.trace},
                    {"--snapshot", &flags.snapshot},
                    {"--show-cluster", &flags.show_cluster},
                    {"--slow", &flags.slow},
                    {"--foreign", &flags.foreign},
                    {"--every-rank", &flags.every_rank},
                    {"--json", &flags.json},
                    {"--help", &flags.help},
                    {"-h", &flags.help}},
                   flags.input);
}

// "3=1.5"
Result<std::pair<int64_t, double>> ReadSlow(std::string_view text) {
  const std::vector<std::string_view> parts = Split(text, '=');
  const std::optional<int64_t> rank = ParseNumber<int64_t>(parts[0]);
  const std::optional<double> factor = ParseNumber<double>(parts.back());
  if (parts.size() == 2 && rank && factor) return std::pair(*rank, *factor);
  return MakeError("--slow: expected RANK=FACTOR, found '", text, "'");
}

// A cluster file's text, or a preset's name.
Result<std::string> ClusterText(const std::string& cluster) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(cluster, ignored)) return cluster;
  INTERLACE_ASSIGN(const std::string file, ReadFile(cluster));
  return file + "\n";  // one line without '=' would be taken for a preset
}

struct Machine {
  ClusterSpec cluster;
  ProfileTable table;
  bool profiled = false;
  const ProfileTable* profile() const { return profiled ? &table : nullptr; }
};

Result<Machine> ReadMachine(const Flags& flags) {
  Machine out;
  INTERLACE_ASSIGN(const std::string text, ClusterText(flags.cluster));
  INTERLACE_ASSIGN(out.cluster, LoadCluster(text, flags.cluster));
  out.profiled = !flags.profile.empty();
  if (out.profiled) {
    INTERLACE_ASSIGN(const std::string profile, ReadFile(flags.profile));
    INTERLACE_ASSIGN(out.table, ParseProfile(profile, flags.profile));
  }
  return out;
}

Status Show(const std::string& text) {
  std::cout << text << std::flush;
  return std::cout ? Status(Ok{}) : MakeError("cannot write to standard output");
}

Status RunSet(const Flags& flags, const SimulateOptions& options) {
  INTERLACE_ASSIGN(const ProgramSet set, ReadProgramSet(flags.set));
  INTERLACE_TRY(CheckProgramSet(set));
  INTERLACE_ASSIGN(const Machine machine, ReadMachine(flags));
  INTERLACE_ASSIGN(const SetSimulation s, SimulateSet(set, machine.cluster, machine.profile(),
                                                      {options.every_rank, options.machine, options.foreign}));
  const auto trace = [&] { return WriteChromeTrace(SetTimeline(s)); };
  if (!flags.trace.empty()) INTERLACE_TRY(WriteFile(flags.trace, trace()));
  if (flags.output == "trace") return Show(trace());
  return Show(flags.output == "json" ? SetSimulationJson(s) : SetSimulationSummary(s));
}

Status Run(const Flags& flags, const SimulateOptions& options) {
  INTERLACE_ASSIGN(std::string text, ReadInput(flags.input));
  INTERLACE_ASSIGN(Program program, Parse(text, flags.input == "-" ? "standard input" : flags.input));
  INTERLACE_TRY(Verify(program));
  INTERLACE_ASSIGN(const Machine machine, ReadMachine(flags));
  INTERLACE_ASSIGN(Simulation simulation, Simulate(program, machine.cluster, machine.profile(), options));
  if (!flags.trace.empty()) INTERLACE_TRY(WriteFile(flags.trace, SimulationTrace(simulation)));
  if (!flags.snapshot.empty()) {
    INTERLACE_ASSIGN(std::string snapshot, SimulationSnapshot(simulation));
    INTERLACE_TRY(WriteFile(flags.snapshot, snapshot));
  }
  if (flags.output == "trace") return Show(SimulationTrace(simulation));
  return Show(flags.output == "json" ? SimulationJson(simulation) : SimulationSummary(simulation));
}

// What is wrong with the options together, or empty.
std::string Misuse(const Flags& flags) {
  static constexpr std::string_view kOutputs[] = {"summary", "json", "trace"};
  if (flags.input.empty() && flags.set.empty())
    return "give a program file, or - for standard input; --help shows examples";
  if (!flags.input.empty() && !flags.set.empty()) return "give a program or --set, not both";
  if (!flags.set.empty() && (!flags.slow.empty() || !flags.snapshot.empty()))
    return "--slow and --snapshot are for one program; leave them out, or simulate a stage by itself";
  if (flags.cluster.empty()) return "give --cluster, a file or a preset such as h100-80gb-8";
  if (std::find(std::begin(kOutputs), std::end(kOutputs), flags.output) == std::end(kOutputs))
    return "--output: expected summary, json or trace, found '" + flags.output + "'";
  return "";
}

int Main(const std::vector<std::string>& args) {
  auto fail = [](const Error& error, int code) {
    std::cerr << "interlace-sim: " << error.ToString() << "\n";
    return code;
  };
  Flags flags;
  if (Status status = Read(args, flags); !status.ok()) return fail(status.error(), 2);
  if (flags.help) {
    std::cout << kHelp;
    return 0;
  }
  if (!flags.show_cluster.empty()) {
    Result<std::string> preset = PresetCluster(flags.show_cluster);
    if (!preset.ok()) return fail(preset.error(), 2);
    std::cout << *preset;
    return 0;
  }
  if (flags.output.empty()) flags.output = flags.json ? "json" : "summary";
  if (const std::string wrong = Misuse(flags); !wrong.empty()) return fail(Error{wrong, {}}, 2);
  SimulateOptions options;
  options.every_rank = flags.every_rank;
  options.machine = flags.machine;
  options.foreign = flags.foreign;
  for (const std::string& text : flags.slow) {
    Result<std::pair<int64_t, double>> slow = ReadSlow(text);
    if (!slow.ok()) return fail(slow.error(), 2);
    options.slow.push_back(*slow);
  }
  Status status = flags.set.empty() ? Run(flags, options) : RunSet(flags, options);
  return status.ok() ? 0 : fail(status.error(), 1);
}

}  // namespace
}  // namespace interlace

int main(int argc, char** argv) {
  return interlace::Main(std::vector<std::string>(argv + 1, argv + argc));
}
