#include "passes/inspect.h"

#include <array>
#include <iomanip>
#include <set>
#include <sstream>

#include "base/scan.h"
#include "ir/liveness.h"
#include "ir/op_table.h"
#include "ir/program.h"
#include "ir/residency.h"

namespace interlace {
namespace {

std::string KindOf(const Op& op) {
  if (!IsOwn(op)) return "compute";
  size_t dot = op.name.find('.');
  return op.name.substr(0, dot);
}

int64_t Count(const Type& type) {
  int64_t count = 1;
  for (const Dim& size : type.sizes) count *= size.is_const() ? size.value : 1;
  return count;
}

int64_t Bytes(const Program& program, ValueId id) {
  Result<int64_t> bytes = program.StorageBytes(program.value(id).type);
  return bytes.ok() ? *bytes : 0;
}

class Counter {
 public:
  explicit Counter(const Program& program) : program_(program), gradient_root_(program.num_values(), 0) {
    for (const State& state : program.states) {
      if (state.role == "grad" || state.role == "full_grad") gradient_root_[state.value] = 1;
    }
  }

  void Phase(const interlace::Phase& phase, int64_t repeats) {
    PhaseSummary summary{phase.name, repeats, static_cast<int64_t>(phase.ops.size()), {}, std::nullopt};
    for (OpId id : phase.ops) {
      const Op& op = program_.op(id);
      ++summary.kinds[KindOf(op)];
      Traffic(op, repeats);
      Gradients(op, repeats);
    }
    Result<PhaseLiveness> life = ComputeLiveness(program_, phase);
    if (life.ok()) summary.peak_bytes = life->peak_bytes;
    if (phase.kind == PhaseKind::kMicroBatch && summary.peak_bytes) {
      out.activation_peak_bytes = std::max(out.activation_peak_bytes.value_or(0), *summary.peak_bytes);
    }
    out.ops += summary.ops;
    out.phases.push_back(std::move(summary));
  }

  ProgramSummary out;

 private:
  void Traffic(const Op& op, int64_t repeats) {
    int64_t* bytes = op.kind == OpKind::kGatherStart   ? &out.gathered_bytes
                     : op.kind == OpKind::kReduceStart ? &out.reduced_bytes
                                                       : nullptr;
    if (bytes == nullptr) return;
    for (size_t i = 0; i < op.units.size() && i < op.results.size(); ++i) {
      const Unit& unit = program_.units[op.units[i]];
      const int64_t elements = op.Attr(kParts) != nullptr ? unit.shard - unit.part : unit.numel - unit.shard;
      *bytes += repeats * elements * DTypeBytes(program_.value(op.results[i]).type.dtype);
    }
  }

  void Gradients(const Op& op, int64_t repeats) {
    if (op.kind == OpKind::kGradBegin) {
      for (ValueId id : op.results) gradient_root_[id] = 1;
      return;
    }
    bool collective = op.kind == OpKind::kReduceStart || op.kind == OpKind::kGatherStart;
    for (ValueId id : op.results) {
      if (id == kNone || collective) continue;
      const Value& value = program_.value(id);
      if (value.root == id || !gradient_root_[value.root]) continue;
      int64_t bytes = repeats * Count(value.type) * DTypeBytes(value.type.dtype);
      if (value.placed) {
        (op.kind == OpKind::kCopy ? out.copied_gradient_bytes : out.placed_gradient_bytes) += bytes;
      } else if (!op.writes.empty()) {
        out.added_gradient_bytes += bytes;
      }
    }
  }

  const Program& program_;
  std::vector<char> gradient_root_;
};

}  // namespace

ProgramSummary Summarize(const Program& program) {
  Counter counter(program);
  for (const auto& [phase, repeats] : program.RunOrder()) counter.Phase(*phase, repeats);
  ProgramSummary out = std::move(counter.out);
  out.level = program.level == Level::kCaptured  ? "captured"
              : program.level == Level::kSharded ? "sharded"
                                                 : "scheduled";
  out.params = static_cast<int64_t>(program.params.size());
  for (const Param& param : program.params) {
    int64_t count = Count(program.value(param.value).type);
    out.param_elements += count;
    if (param.trainable) out.trainable_elements += count;
    // A parameter of a unit has no storage of its own: its unit's states hold it.
    if (param.unit == kNone && program.RootOf(param.value) == param.value)
      out.persistent_bytes += Bytes(program, param.value);
  }
  for (const Buffer& buffer : program.buffers) out.persistent_bytes += Bytes(program, buffer.value);
  for (const Const& constant : program.consts) out.persistent_bytes += Bytes(program, constant.value);
  const Residency residency = ComputeResidency(program);
  const std::set<ValueId> moving(residency.states.begin(), residency.states.end());  // among the storages of each phase
  for (const State& state : program.states) {
    if (!moving.contains(state.value))
      (state.persistent ? out.persistent_bytes : out.step_bytes) += Bytes(program, state.value);
  }
  if (const std::string* notes = program.Meta("tensor.notes")) {
    for (std::string_view note : Split(*notes, '\n')) out.not_cut.emplace_back(note);
  }
  out.units = static_cast<int64_t>(program.units.size());
  UnitId largest = kNone;
  for (const Unit& unit : program.units) {
    int64_t bytes = unit.numel * DTypeBytes(unit.dtype);
    if (largest != kNone && bytes <= out.largest_unit_bytes) continue;
    largest = unit.id;
    out.largest_unit_bytes = bytes;
  }
  if (largest != kNone) {
    out.largest_unit.append("u").append(std::to_string(largest));
    for (const Param& param : program.params) {
      if (param.unit == largest) out.largest_unit_params.push_back(param.name);
    }
  }
  return out;
}

std::string BytesText(int64_t bytes) {
  constexpr std::array<const char*, 6> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) value /= 1024, ++unit;
  std::ostringstream out;
  out << std::fixed << std::setprecision(unit == 0 ? 0 : 1) << value << " " << kUnits[unit];
  return out.str();
}

std::string SummaryText(const ProgramSummary& summary) {
  std::ostringstream out;
  auto bytes = [](const std::optional<int64_t>& b) { return b ? BytesText(*b) : std::string("symbolic (bind first)"); };
  out << "level          " << summary.level << ", " << summary.ops << " ops\n";
  for (const PhaseSummary& phase : summary.phases) {
    out << "phase          " << phase.name << " x" << phase.repeats << ": " << phase.ops << " ops (";
    bool first = true;
    for (const auto& [kind, count] : phase.kinds) {
      out << (first ? "" : ", ") << count << " " << kind;
      first = false;
    }
    out << "), peak " << bytes(phase.peak_bytes) << "\n";
  }
  out << "parameters     " << summary.params << ", " << summary.param_elements << " elements, "
      << summary.trainable_elements << " trainable\n";
  if (summary.units > 0) {
    out << "units          " << summary.units << ", largest " << summary.largest_unit << " "
        << BytesText(summary.largest_unit_bytes);
    for (size_t i = 0; i < summary.largest_unit_params.size(); ++i)
      out << (i ? ", " : " (") << summary.largest_unit_params[i];
    out << (summary.largest_unit_params.empty() ? "" : ")") << "\n";
    out << "received       " << BytesText(summary.gathered_bytes) << " by gathers, " << BytesText(summary.reduced_bytes)
        << " by reduces, a step and rank\n";
    out << "gradients      " << BytesText(summary.placed_gradient_bytes) << " written in place, "
        << BytesText(summary.copied_gradient_bytes) << " copied, " << BytesText(summary.added_gradient_bytes)
        << " added\n";
  }
  out << "persistent     " << BytesText(summary.persistent_bytes) << ", and " << BytesText(summary.step_bytes)
      << " within a step\n";
  for (const std::string& note : summary.not_cut) out << "not cut        " << note << "\n";
  out << "activations    " << bytes(summary.activation_peak_bytes) << " at the peak of a micro-batch\n";
  return out.str();
}

}  // namespace interlace
