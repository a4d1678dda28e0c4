// interlace-opt — programs in, programs out: runs passes on a text file. Exit codes: 0 fine, 1 the program or a pass
// says no, 2 wrong command line.
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "base/command_line.h"
#include "base/digest.h"
#include "base/files.h"
#include "ir/program.h"
#include "ir/program_set.h"
#include "ir/text.h"
#include "ir/verifier.h"
#include "passes/explain.h"
#include "passes/inspect.h"
#include "passes/pass_table.h"
#include "passes/pipeline.h"
#include "passes/runner.h"

namespace interlace {
namespace {

constexpr std::string_view kHelp = R"(interlace-opt [options] FILE|-

Reads a program (docs/ir.md), runs passes on it and prints the result.

  --passes=PIPELINE   passes in order, with options in parentheses; see --list-passes
  --verify            verify the program before, and after every pass that changes it
  --bind a=4,s=128    first replace symbols by numbers
  -o FILE             write the result there instead of standard output
  --dump-ir DIR       also write the text before and after every pass: DIR/00-input.il, DIR/01-PASS.il, ...
  --repro FILE        when a pass fails, write the text before it under the command that repeats it
                      (default with --dump-ir: DIR/repro.il)
  --timing            say on standard error how long every pass took
  --print-summary     print what the program holds and costs instead of its text
  --explain           print what a search decided, with its numbers, instead of its text
  --digest            print the SHA-256 of the text instead of the text
  --check-set         FILE is a program set (docs/ir.md): check that its stages fit, and run no pass
  --list-passes       print every pass with its options
  --help              this text

Examples:
  interlace-opt --passes='canonicalize,shard(axis=dp,ranks=4),update(clip=1.0)' graph.il -o program.il
  interlace-opt --verify program.il -o /dev/null
  interlace-opt --bind b=1,s=2048 --print-summary graph.il
  cat graph.il | interlace-opt --passes=canonicalize --dump-ir steps -

Exit codes: 0 fine, 1 the program or a pass says no, 2 wrong command line.
)";

struct Flags {
  std::string passes, bind, output = "-", dump_dir, repro, input;
  bool verify = false, timing = false, summary = false, explain = false, digest = false, list = false, help = false,
       check_set = false;
};

Status Read(const std::vector<std::string>& args, Flags& flags) {
  return ReadFlags(args,
                   {{"--passes", &flags.passes},
                    {"--bind", &flags.bind},
                    {"-o", &flags.output},
                    {"--dump-ir", &flags.dump_dir},
                    {"--repro", &flags.repro},
                    {"--verify", &flags.verify},
                    {"--timing", &flags.timing},
                    {"--print-summary", &flags.summary},
                    {"--explain", &flags.explain},
                    {"--digest", &flags.digest},
                    {"--list-passes", &flags.list},
                    {"--check-set", &flags.check_set},
                    {"--help", &flags.help},
                    {"-h", &flags.help}},
                   flags.input);
}

// "b=4,s=128"
Result<Binding> ReadBinding(std::string_view text) {
  Binding binding;
  while (!text.empty()) {
    std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), item.size() + 1));
    size_t equals = item.find('=');
    std::string number(equals == std::string_view::npos ? "" : item.substr(equals + 1));
    size_t digits = number.find_first_not_of("0123456789");
    if (equals == 0 || number.empty() || number.size() > 18 || digits != std::string::npos) {
      return MakeError("--bind: expected NAME=NUMBER, found '", item, "'");
    }
    if (!binding.emplace(std::string(item.substr(0, equals)), std::stoll(number)).second) {
      return MakeError("--bind: '", item.substr(0, equals), "' is given twice");
    }
  }
  return binding;
}

// What the command line asks for, as text for the output.
Result<std::string> Transform(const Flags& flags, const std::vector<PassCall>& calls, const Binding& binding) {
  INTERLACE_ASSIGN(std::string text, ReadInput(flags.input));
  INTERLACE_ASSIGN(Program program, Parse(text, flags.input == "-" ? "standard input" : flags.input));
  if (!binding.empty()) {
    INTERLACE_ASSIGN(Program bound, Bind(program, binding));
    program = std::move(bound);
  }
  INTERLACE_ASSIGN(std::vector<PassReport> reports,
                   RunPasses(program, calls, {flags.verify, flags.dump_dir, flags.repro}));
  if (flags.timing) {
    for (const PassReport& report : reports) {
      std::cerr << report.pass << ": " << report.seconds * 1e3 << " ms, " << (report.changed ? "changed" : "no change")
                << ", " << report.ops << " ops\n";
    }
  }
  if (flags.explain) return Explain(program);
  if (flags.summary) return SummaryText(Summarize(program));
  std::string printed = Print(program);
  return flags.digest ? Digest(printed) + "\n" : printed;
}

Result<std::string> CheckSet(const std::string& path) {
  INTERLACE_ASSIGN(const ProgramSet set, ReadProgramSet(path));
  INTERLACE_TRY(CheckProgramSet(set));
  return "ok: " + std::to_string(set.stages.size()) + " stages along " + set.axis + "\n";
}

int Main(const std::vector<std::string>& args) {
  auto fail = [](const Error& error, int code) {
    std::cerr << "interlace-opt: " << error.ToString() << "\n";
    return code;
  };
  Flags flags;
  if (Status status = Read(args, flags); !status.ok()) return fail(status.error(), 2);
  if (flags.help) {
    std::cout << kHelp;
    return 0;
  }
  if (flags.list) {
    std::cout << PassTableText();
    return 0;
  }
  if (flags.input.empty())
    return fail(Error{"give a program file, or - for standard input; --help shows examples", {}}, 2);
  Result<std::vector<PassCall>> calls = ParsePipeline(flags.passes);
  if (!calls.ok()) return fail(calls.error(), 2);
  Result<Binding> binding = ReadBinding(flags.bind);
  if (!binding.ok()) return fail(binding.error(), 2);
  Result<std::string> text = flags.check_set ? CheckSet(flags.input) : Transform(flags, *calls, *binding);
  if (!text.ok()) return fail(text.error(), 1);
  if (flags.output == "-") {
    std::cout << *text << std::flush;
    return std::cout ? 0 : fail(Error{"cannot write to standard output", {}}, 1);
  }
  Status written = WriteFile(flags.output, *text);
  return written.ok() ? 0 : fail(written.error(), 1);
}

}  // namespace
}  // namespace interlace

int main(int argc, char** argv) {
  return interlace::Main(std::vector<std::string>(argv + 1, argv + argc));
}
