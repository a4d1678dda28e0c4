// interlace-sim — predicts a step: program and cluster in; a summary, JSON, a trace or a memory snapshot out. Exit
// codes: 0 fine, 1 the program, cluster or profile says no, 2 wrong command line.
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "base/suggest.h"
#include "ir/text.h"
#include "ir/verifier.h"
#include "sim/simulate.h"

namespace interlace {
namespace {

constexpr std::string_view kHelp = R"(interlace-sim [options] PROGRAM|-

Predicts the time and memory of one step of a scheduled program (docs/ir.md) on a cluster (docs/cost_model.md).

  --cluster C          a cluster file (TOML), or a preset with a number of devices: h100-80gb-32, a100-40gb-8, l4-24gb-4, local-2
  --profile FILE       times measured on the real machine; what is not in it is estimated
  --machine TEXT       fingerprint that the profile must have
  --foreign            use a profile of another machine, and say so in the result
  --slow RANK=FACTOR   this rank computes FACTOR times slower; may be given several times
  --every-rank         simulate every rank although they are alike
  --json               print the result as JSON instead of a summary
  --trace FILE         write a trace for Perfetto, chrome://tracing and the tools of PyTorch's profiler
  --snapshot FILE      write the memory history in the form of torch.cuda.memory._snapshot(), as JSON
  --show-cluster NAME  print a preset, to save and edit
  --help               this text

Examples:
  interlace-sim program.il --cluster h100-80gb-32
  interlace-sim program.il --cluster local-2 --profile here.profile --json
  interlace-sim program.il --cluster a100-40gb-8 --slow 3=1.2 --trace step.json
  interlace-sim --show-cluster l4-24gb-8 > mine.toml; interlace-sim program.il --cluster mine.toml
  interlace-opt --bind b=1,s=2048 graph.il | interlace-sim - --cluster local-1

Exit codes: 0 fine, 1 the program, cluster or profile says no, 2 wrong command line.
)";

struct Flags {
  std::string input, cluster, profile, machine, trace, snapshot, show_cluster;
  std::vector<std::string> slow;
  bool foreign = false, every_rank = false, json = false, help = false;
};

// `--name=value` and `--name value` alike.
Result<Flags> ReadFlags(const std::vector<std::string>& args) {
  Flags flags;
  const std::vector<std::pair<std::string_view, std::string Flags::*>> texts = {
      {"--cluster", &Flags::cluster}, {"--profile", &Flags::profile},   {"--machine", &Flags::machine},
      {"--trace", &Flags::trace},     {"--snapshot", &Flags::snapshot}, {"--show-cluster", &Flags::show_cluster}};
  const std::vector<std::pair<std::string_view, bool Flags::*>> switches = {{"--foreign", &Flags::foreign},
                                                                            {"--every-rank", &Flags::every_rank},
                                                                            {"--json", &Flags::json},
                                                                            {"--help", &Flags::help},
                                                                            {"-h", &Flags::help}};
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    if (arg == "-" || !arg.starts_with("-")) {
      if (!flags.input.empty()) return MakeError("one program at a time: ", flags.input, " or ", arg, "?");
      flags.input = arg;
      continue;
    }
    size_t equals = arg.find('=');
    std::string_view name = std::string_view(arg).substr(0, equals);
    auto value = [&]() -> Result<std::string> {
      if (equals != std::string::npos) return arg.substr(equals + 1);
      if (i + 1 == args.size()) return MakeError(name, " needs a value");
      return args[++i];
    };
    bool known = false;
    for (auto [flag, field] : switches) {
      if (flag != name) continue;
      if (equals != std::string::npos) return MakeError(name, " takes no value");
      flags.*field = known = true;
    }
    for (auto [flag, field] : texts) {
      if (flag != name) continue;
      known = true;
      INTERLACE_ASSIGN(flags.*field, value());
    }
    if (name == "--slow") {
      known = true;
      INTERLACE_ASSIGN(std::string text, value());
      flags.slow.push_back(text);
    }
    if (known) continue;
    std::vector<std::string_view> names = {"--slow"};
    for (auto [flag, field] : texts) names.push_back(flag);
    for (auto [flag, field] : switches) names.push_back(flag);
    return MakeError("unknown option ", name, DidYouMean(name, names));
  }
  return flags;
}

// "3=1.5"
Result<std::pair<int64_t, double>> ReadSlow(std::string_view text) {
  std::pair<int64_t, double> out;
  size_t equals = text.find('=');
  const char* end = text.data() + text.size();
  if (equals != std::string_view::npos) {
    auto [rank_end, bad_rank] = std::from_chars(text.data(), text.data() + equals, out.first);
    auto [factor_end, bad_factor] = std::from_chars(text.data() + equals + 1, end, out.second);
    bool whole = rank_end == text.data() + equals && factor_end == end;
    if (whole && bad_rank == std::errc() && bad_factor == std::errc()) return out;
  }
  return MakeError("--slow: expected RANK=FACTOR, found '", text, "'");
}

Result<std::string> ReadText(const std::string& path) {
  std::error_code ignored;
  std::ifstream in(path, std::ios::binary);
  if (!in || std::filesystem::is_directory(path, ignored)) {
    return MakeError("cannot read ", path, ": ", in ? "it is a folder" : std::strerror(errno));
  }
  return std::string(std::istreambuf_iterator<char>(in), {});
}

Status WriteText(const std::string& path, std::string_view text) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  if (!out) return MakeError("cannot write ", path, ": ", std::strerror(errno));
  out << text << std::flush;
  if (!out) return MakeError("cannot write all of ", path, ": ", std::strerror(errno));
  return Ok{};
}

Result<std::string> ReadInput(const std::string& path) {
  if (path != "-") return ReadText(path);
  return std::string(std::istreambuf_iterator<char>(std::cin), {});
}

Status Run(const Flags& flags, const SimulateOptions& options) {
  INTERLACE_ASSIGN(std::string text, ReadInput(flags.input));
  INTERLACE_ASSIGN(Program program, Parse(text, flags.input == "-" ? "standard input" : flags.input));
  INTERLACE_TRY(Verify(program));
  std::string cluster_text = flags.cluster;
  std::error_code ignored;
  if (std::filesystem::is_regular_file(flags.cluster, ignored)) {
    INTERLACE_ASSIGN(std::string file, ReadText(flags.cluster));
    cluster_text = file + "\n";  // one line without '=' would be taken for a preset
  }
  INTERLACE_ASSIGN(ClusterSpec cluster, LoadCluster(cluster_text, flags.cluster));
  ProfileTable table;
  if (!flags.profile.empty()) {
    INTERLACE_ASSIGN(std::string profile, ReadText(flags.profile));
    INTERLACE_ASSIGN(table, ParseProfile(profile, flags.profile));
  }
  INTERLACE_ASSIGN(Simulation simulation,
                   Simulate(program, cluster, flags.profile.empty() ? nullptr : &table, options));
  if (!flags.trace.empty()) INTERLACE_TRY(WriteText(flags.trace, SimulationTrace(simulation)));
  if (!flags.snapshot.empty()) {
    INTERLACE_ASSIGN(std::string snapshot, SimulationSnapshot(simulation));
    INTERLACE_TRY(WriteText(flags.snapshot, snapshot));
  }
  std::cout << (flags.json ? SimulationJson(simulation) : SimulationSummary(simulation)) << std::flush;
  if (!std::cout) return MakeError("cannot write to standard output");
  return Ok{};
}

int Main(const std::vector<std::string>& args) {
  auto fail = [](const Error& error, int code) {
    std::cerr << "interlace-sim: " << error.ToString() << "\n";
    return code;
  };
  Result<Flags> flags = ReadFlags(args);
  if (!flags.ok()) return fail(flags.error(), 2);
  if (flags->help) {
    std::cout << kHelp;
    return 0;
  }
  if (!flags->show_cluster.empty()) {
    Result<std::string> preset = PresetCluster(flags->show_cluster);
    if (!preset.ok()) return fail(preset.error(), 2);
    std::cout << *preset;
    return 0;
  }
  if (flags->input.empty())
    return fail(Error{"give a program file, or - for standard input; --help shows examples", {}}, 2);
  if (flags->cluster.empty()) return fail(Error{"give --cluster, a file or a preset such as h100-80gb-8", {}}, 2);
  SimulateOptions options;
  options.every_rank = flags->every_rank;
  options.machine = flags->machine;
  options.foreign = flags->foreign;
  for (const std::string& text : flags->slow) {
    Result<std::pair<int64_t, double>> slow = ReadSlow(text);
    if (!slow.ok()) return fail(slow.error(), 2);
    options.slow.push_back(*slow);
  }
  Status status = Run(*flags, options);
  return status.ok() ? 0 : fail(status.error(), 1);
}

}  // namespace
}  // namespace interlace

int main(int argc, char** argv) {
  return interlace::Main(std::vector<std::string>(argv + 1, argv + argc));
}
