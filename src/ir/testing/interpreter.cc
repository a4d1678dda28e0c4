#include "ir/testing/interpreter.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>
#include <utility>

#include "base/exact_sum.h"
#include "ir/op_table.h"
#include "ir/testing/evaluate_rule.h"
#include "ir/testing/machine.h"
#include "ir/testing/optimizers.h"

namespace interlace::testing {
namespace {

// The optimizer and the sum over ranks and micro-batches of a captured program, on whole parameters.
class TextbookStep {
 public:
  TextbookStep(const Program& program, const InterpretOptions& options, Machine& machine)
      : program_(program), options_(options), machine_(machine), each_(options.accumulate_mode == "reduce_each") {
    for (OpId id : program.MicroBatchPhase()->ops) {
      const Op& op = program.op(id);
      if (op.kind == OpKind::kGrad) reduced_in_[op.args[0].value] = program.value(op.args[1].value).type.dtype;
    }
  }

  // Takes the gradients a micro-batch left.
  void Add() {
    for (auto& [param, by_rank] : machine_.grads) {
      DType dtype = program_.value(param).type.dtype;
      std::vector<Dense> parts = each_ ? std::vector<Dense>{SumOverRanks(by_rank, param)} : std::move(by_rank);
      auto [place, fresh] = total_.emplace(param, parts);
      if (fresh) continue;
      for (size_t i = 0; i < parts.size(); ++i) AddTo(place->second[i], parts[i], dtype);
    }
    machine_.grads.clear();
  }

  Status Apply(RunResult& result) {
    std::map<ValueId, Dense> gradients;
    ExactSum squares;
    for (auto& [param, parts] : total_) {
      Dense sum = each_ ? std::move(parts[0]) : SumOverRanks(parts, param);
      squares.AddSquares(sum.data.data(), static_cast<int64_t>(sum.data.size()));
      gradients[param] = std::move(sum);
    }
    total_.clear();
    double factor = 1.0 / static_cast<double>(machine_.ranks() * options_.accumulation);
    if (options_.clip) {
      double norm = std::sqrt(squares.Round()) * factor;
      result.norms.push_back(norm);
      if (!std::isfinite(norm)) return Ok{};
      factor *= std::min(1.0, *options_.clip / (norm + 1e-6));
    }
    for (const Param& param : program_.params) {
      auto found = gradients.find(param.value);
      if (found == gradients.end() || param.group == kNone) continue;
      INTERLACE_TRY(Update(param, found->second, factor));
    }
    return Ok{};
  }

 private:
  static void AddTo(Dense& sum, const Dense& part, DType dtype) {
    for (size_t i = 0; i < sum.data.size(); ++i) sum.data[i] = RoundTo(dtype, sum.data[i] + part.data[i]);
  }
  // In the dtype that the gradient is reduced in; 16-bit floats are added up in f32 and rounded once. One rank reduces
  // nothing.
  Dense SumOverRanks(std::vector<Dense> parts, ValueId param) const {
    if (parts.size() == 1) return parts[0];
    DType dtype = reduced_in_.at(param);
    auto round = [&](Dense& x) {
      for (double& value : x.data) value = RoundTo(dtype, value);
    };
    for (Dense& part : parts) round(part);
    const auto sum_of = [&](auto begin, auto end) {
      Dense sum = *begin;
      while (++begin != end) AddTo(sum, *begin, SumDType(dtype));
      round(sum);
      return sum;
    };
    const auto block = static_cast<ptrdiff_t>(parts.size()) / options_.replicas;
    std::vector<Dense> sums;
    for (auto at = parts.begin(); at != parts.end(); at += block) sums.push_back(sum_of(at, at + block));
    return sum_of(sums.begin(), sums.end());
  }

  Status Update(const Param& param, const Dense& grad, double factor) {
    DType dtype = program_.value(param.value).type.dtype;
    const std::string& optimizer = program_.groups[param.group].optimizer;
    std::vector<double> hyper = machine_.Hyper(param.group);
    INTERLACE_ASSIGN(Dense weight, machine_.Read(0, param.value));
    if (const int32_t rule = program_.groups[param.group].rule; rule != kNone)
      return UpdateByRule(param, program_.rules[rule], hyper, grad, factor, weight);
    Dense& first =
        first_.emplace(param.value, Dense{weight.sizes, std::vector<double>(weight.data.size())}).first->second;
    Dense& second = second_.emplace(param.value, first).first->second;
    for (size_t i = 0; i < weight.data.size(); ++i) {
      INTERLACE_TRY(
          StepElement(optimizer, hyper, grad.data[i] * factor, &weight.data[i], &first.data[i], &second.data[i]));
      first.data[i] = RoundTo(dtype, first.data[i]);
      second.data[i] = RoundTo(dtype, second.data[i]);
    }
    for (int64_t rank = 0; rank < machine_.ranks(); ++rank) INTERLACE_TRY(machine_.Write(rank, param.value, weight));
    return Ok{};
  }

  Status UpdateByRule(const Param& param, const UpdateRule& rule, const std::vector<double>& row, const Dense& grad,
                      double factor, Dense& weight) {
    const DType dtype = program_.value(param.value).type.dtype;
    const RuleForm& form = rule.forms[static_cast<size_t>(row[0])];
    std::vector<Dense>& states = states_[param.value];
    states.resize(rule.states.size(), Dense{weight.sizes, std::vector<double>(weight.data.size())});
    for (size_t i = 0; i < weight.data.size(); ++i) {
      std::vector<double> registers(form.registers);
      registers[0] = weight.data[i], registers[1] = grad.data[i] * factor;
      for (size_t k = 0; k < states.size(); ++k) registers[2 + k] = states[k].data[i];
      EvaluateRule(form, std::span(row).subspan(1), registers);
      weight.data[i] = registers[0];
      for (size_t k = 0; k < states.size(); ++k) states[k].data[i] = RoundTo(dtype, registers[2 + k]);
    }
    for (int64_t rank = 0; rank < machine_.ranks(); ++rank) INTERLACE_TRY(machine_.Write(rank, param.value, weight));
    return Ok{};
  }

  const Program& program_;
  const InterpretOptions& options_;
  Machine& machine_;
  bool each_;
  std::map<ValueId, DType> reduced_in_;           // by parameter
  std::map<ValueId, std::vector<Dense>> total_;   // one part (reduce_each) or one per rank
  std::map<ValueId, Dense> first_, second_;       // optimizer states
  std::map<ValueId, std::vector<Dense>> states_;  // of rules
};

// Of one step, by name and then by micro-batch, whatever the order of runs.
using StepOutputs = std::map<std::string, std::multimap<int64_t, std::vector<double>>>;

void KeepOutputs(Machine& machine, int64_t micro_batch, StepOutputs& step) {
  for (auto& [name, by_rank] : machine.outputs) {
    for (Dense& x : by_rank) step[name].emplace(micro_batch, std::move(x.data));
  }
  machine.outputs.clear();
}

void AddStep(StepOutputs& step, RunResult& result) {
  for (auto& [name, by_micro_batch] : step) {
    for (auto& [micro_batch, data] : by_micro_batch) result.outputs[name].push_back(std::move(data));
  }
}

Status RunCaptured(const Program& program, const InterpretOptions& options, Machine& machine, RunResult& result) {
  const Phase* phase = program.MicroBatchPhase();
  if (phase == nullptr) return MakeError("the program has no single micro-batch phase");
  TextbookStep textbook(program, options, machine);
  for (int64_t step = 0; step < options.steps; ++step) {
    machine.BeginStep(step);
    StepOutputs outputs;
    for (int64_t micro_batch = 0; micro_batch < options.accumulation; ++micro_batch) {
      machine.SetInputs(micro_batch);
      INTERLACE_TRY(machine.RunPhase(*phase));
      KeepOutputs(machine, micro_batch, outputs);
      textbook.Add();
    }
    AddStep(outputs, result);
    INTERLACE_TRY(textbook.Apply(result));
  }
  return Ok{};
}

Status RunSharded(const Program& program, const InterpretOptions& options, Machine& machine, RunResult& result) {
  for (int64_t step = 0; step < options.steps; ++step) {
    machine.BeginStep(step);
    StepOutputs outputs;
    for (const auto& [phase, first, count] : program.RunsOfStep()) {
      for (int64_t i = 0; i < count; ++i) {
        const bool once = phase->kind == PhaseKind::kStep;
        const int64_t micro_batch = once ? program.accumulation : first + i * program.width;
        if (!once) machine.SetInputs(micro_batch);
        INTERLACE_TRY(machine.RunPhase(*phase));
        KeepOutputs(machine, micro_batch, outputs);
      }
    }
    AddStep(outputs, result);
    if (machine.norm >= 0 || std::isnan(machine.norm)) result.norms.push_back(machine.norm);
  }
  return Ok{};
}

std::string Compare(const std::string& what, const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size())
    return what + ": " + std::to_string(a.size()) + " and " + std::to_string(b.size()) + " elements";
  for (size_t i = 0; i < a.size(); ++i) {
    if (!std::isnan(a[i]) && std::memcmp(&a[i], &b[i], sizeof(double)) == 0) continue;
    return MakeError(what, " element ", i, ": ", a[i], " and ", b[i]).message;
  }
  return "";
}

template <typename Map>
std::string SameNames(const std::string& what, const Map& a, const Map& b) {
  for (const auto& [name, values] : a) {
    if (b.count(name) == 0) return what + " '" + name + "' is missing in the second";
  }
  for (const auto& [name, values] : b) {
    if (a.count(name) == 0) return what + " '" + name + "' is missing in the first";
  }
  return "";
}

using Runs = std::map<std::string, std::vector<std::vector<double>>>;
std::string CompareRuns(const std::string& what, const Runs& a, const Runs& b) {
  std::string difference = SameNames(what, a, b);
  for (auto it = a.begin(); it != a.end() && difference.empty(); ++it) {
    const auto& other = b.at(it->first);
    std::string name = what + " '" + it->first + "'";
    if (it->second.size() != other.size()) return name + ": another number of runs";
    for (size_t i = 0; i < other.size() && difference.empty(); ++i) {
      difference = Compare(name + " run " + std::to_string(i), it->second[i], other[i]);
    }
  }
  return difference;
}

Result<RunResult> RunProgram(const Program& program, const InterpretOptions& options, const StageOfSet* stage) {
  bool captured = program.level == Level::kCaptured;
  Machine machine(program, options, captured ? options.ranks : 0, stage);
  INTERLACE_TRY(machine.Init());
  RunResult result;
  INTERLACE_TRY(captured ? RunCaptured(program, options, machine, result)
                         : RunSharded(program, options, machine, result));
  if (options.steps > 0) INTERLACE_TRY(machine.Flush());
  INTERLACE_TRY(machine.BringBack());
  INTERLACE_ASSIGN(result.params, machine.FinalParams());
  for (const Buffer& buffer : program.buffers) {
    for (int64_t rank = 0; rank < machine.ranks(); ++rank) {
      INTERLACE_ASSIGN(Dense x, machine.Read(rank, buffer.value));
      result.buffers[buffer.name].push_back(std::move(x.data));
    }
  }
  return result;
}

}  // namespace

Result<RunResult> Interpret(const Program& program, const InterpretOptions& options) {
  return RunProgram(program, options, nullptr);
}

static bool Changes(const Program& program, const std::string& buffer) {
  for (const Phase& phase : program.phases) {
    for (OpId id : phase.ops) {
      for (ValueId written : WrittenOperands(program, program.op(id))) {
        for (const Buffer& b : program.buffers) {
          if (b.name == buffer && b.value == program.RootOf(written)) return true;
        }
      }
    }
  }
  return false;
}

Result<RunResult> InterpretSet(const ProgramSet& set, const InterpretOptions& options) {
  Mailbox mail(/*shared=*/true);
  std::vector<Result<RunResult>> results(set.stages.size(), RunResult());
  std::vector<std::thread> threads;
  for (size_t s = 0; s < set.stages.size(); ++s) {
    threads.emplace_back([&, s] {
      const StageOfSet stage{set.axis, static_cast<int64_t>(s), &mail};
      results[s] = RunProgram(set.stages[s].program, options, &stage);
      if (!results[s].ok()) mail.Close();  // the others need not wait for it
    });
  }
  for (std::thread& thread : threads) thread.join();
  RunResult all;
  for (size_t s = 0; s < results.size(); ++s) {
    if (!results[s].ok())
      return Error{results[s].error().message, "stage " + std::to_string(s) + ", " + results[s].error().where};
    for (auto& [name, values] : results[s]->outputs) all.outputs[name] = std::move(values);
    for (auto& [name, values] : results[s]->params) all.params[name] = std::move(values);
    for (auto& [name, values] : results[s]->buffers) {  // those of the stage that changes them
      if (all.buffers.contains(name) && !Changes(set.stages[s].program, name)) continue;
      all.buffers[name] = std::move(values);
    }
    if (!results[s]->norms.empty()) all.norms = results[s]->norms;
  }
  return all;
}

std::string FirstDifference(const RunResult& a, const RunResult& b) {
  std::string difference = CompareRuns("output", a.outputs, b.outputs);
  // One of the two may have had no reason to compute a norm.
  if (difference.empty() && !a.norms.empty() && !b.norms.empty()) difference = Compare("norms", a.norms, b.norms);
  if (difference.empty()) difference = SameNames("parameter", a.params, b.params);
  for (auto it = a.params.begin(); it != a.params.end() && difference.empty(); ++it) {
    difference = Compare("parameter '" + it->first + "'", it->second, b.params.at(it->first));
  }
  if (difference.empty()) difference = CompareRuns("buffer", a.buffers, b.buffers);
  return difference;
}

}  // namespace interlace::testing
