#include "passes/sharding.h"

#include <algorithm>
#include <optional>

#include "base/suggest.h"
#include "ir/text.h"
#include "passes/stages/recut.h"

namespace interlace {
namespace {

// Elements of a type whose sizes are numbers; nothing for symbols or overflow.
std::optional<int64_t> Elements(const Type& type) {
  int64_t count = 1;
  for (const Dim& size : type.sizes) {
    if (!size.is_const() || size.value < 0 || __builtin_mul_overflow(count, size.value, &count)) return std::nullopt;
  }
  return count;
}

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

bool IsDense(const Type& type) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (size_t i = 0; i < type.sizes.size(); ++i) {
    if (type.sizes[i] == Dim(0)) return true;
    if (type.sizes[i] == Dim(1)) continue;
    if (!type.strides[i].is_const()) return false;
    dims.emplace_back(type.strides[i].value, type.sizes[i].value);
  }
  std::sort(dims.begin(), dims.end());
  int64_t next = 1;
  for (auto [stride, size] : dims) {
    if (stride != next) return false;
    next *= size;
  }
  return true;
}

bool SameGeometry(const Type& a, const Type& b) {
  if (a.sizes != b.sizes) return false;
  for (size_t i = 0; i < a.sizes.size(); ++i) {
    if (!(a.sizes[i] == Dim(1)) && !(a.strides[i] == b.strides[i])) return false;
  }
  return true;
}

Result<ShardingOptions> ReadShardingOptions(const Program& program, const PassOptions& options) {
  ShardingOptions out;
  INTERLACE_ASSIGN(out.axis, options.Axes("axis", "dp"));
  INTERLACE_ASSIGN(out.replicas, options.Axes("replicas", "none"));
  if (out.replicas == "none") out.replicas.clear();
  std::string wanted = out.axis + (out.replicas.empty() ? "" : "," + out.replicas);
  std::vector<std::string_view> known;
  for (const Axis& axis : program.mesh) known.push_back(axis.name);
  for (std::string_view axis : AxesOf(wanted)) {
    const bool declared = std::find(known.begin(), known.end(), axis) != known.end();
    if (declared || (known.empty() && axis == out.axis && out.replicas.empty())) continue;
    return MakeError("the mesh has no axis '", axis, "'", DidYouMean(axis, known),
                     known.empty() ? "; declare it first: mesh(axes=replica:2+dp:2)" : "");
  }
  for (const std::string& axes : {out.axis, out.replicas}) {
    const std::vector<std::string_view> named = AxesOf(axes);
    const auto first = named.empty() ? known.end() : std::find(known.begin(), known.end(), named[0]);
    const bool neighbours =
        static_cast<size_t>(known.end() - first) >= named.size() && std::equal(named.begin(), named.end(), first);
    if (!known.empty() && !neighbours) {
      return MakeError("axes written together must follow one another in the mesh, and ", axes, " do not");
    }
  }
  out.copies = program.AxisSize(out.replicas);
  if (known.empty()) {
    INTERLACE_ASSIGN(out.ranks, options.Int("ranks", std::nullopt, 1));
  } else {
    const int64_t size = program.AxisSize(out.axis);
    INTERLACE_ASSIGN(out.ranks, options.Int("ranks", size, 1));
    if (out.ranks != size) {
      return MakeError("axis ", out.axis, " has ", size, " ranks in the program's mesh, not ", out.ranks);
    }
  }
  Result<std::string> wait = options.Choice("wait", {"next", "now"});
  if (!wait.ok()) return wait.error();
  out.wait_next = *wait == "next";
  return out;
}

// Nothing in the phase changes a parameter, or views one in ways that no gather can stand in for.
static Status CheckUses(const Program& program, const Phase& phase) {
  const std::vector<int32_t> param_index = ParamIndex(program);
  const PhaseFacts facts(program, phase);
  for (const Param& param : program.params) {
    if (facts.writes[param.value].empty()) continue;
    const Op& op = program.op(phase.ops[facts.writes[param.value][0]]);
    return Error{"parameter '" + param.name + "' is changed in place by the model; only buffers may be",
                 PrintOp(program, op)};
  }
  for (OpId id : phase.ops) {
    const Op& op = program.op(id);
    if (IsPureView(program, op)) continue;
    for (ValueId result : op.results) {
      if (result == kNone || param_index[program.RootOf(result)] < 0) continue;
      return Error{"%" + std::to_string(result) + " is a view of parameter '" +
                       program.params[param_index[program.RootOf(result)]].name +
                       "' made by an op that does more than view",
                   PrintOp(program, op)};
    }
  }
  return Ok{};
}

Status CheckShardable(const Program& program, const ShardingOptions& options) {
  constexpr int64_t kMaxElements = int64_t{1} << 56;  // bytes and padding still fit in 64 bits
  if (options.ranks > (1 << 24)) return MakeError("ranks=", options.ranks, " is more than ", 1 << 24);
  for (const Param& param : program.params) {
    const Type& type = program.value(param.value).type;
    std::optional<int64_t> count = Elements(type);
    if (!count || *count > kMaxElements) {
      return MakeError("parameter '", param.name, "' is ", PrintType(program, type),
                       "; sizes must be numbers, bind them first");
    }
    if (!IsDense(type)) {
      return MakeError("parameter '", param.name, "' is ", PrintType(program, type),
                       ", which leaves gaps or overlaps in memory; make it contiguous");
    }
    if (program.RootOf(param.value) != param.value) {
      return MakeError("parameter '", param.name, "' shares the storage of %", program.RootOf(param.value));
    }
    if (param.trainable && !IsFloating(type.dtype)) {
      return MakeError("parameter '", param.name, "' is trainable but ", DTypeName(type.dtype), " is no floating type");
    }
  }
  for (const Phase& phase : program.phases) INTERLACE_TRY(CheckUses(program, phase));
  return Ok{};
}

void DeclareUnits(Program& program, const ShardingOptions& options, bool resident) {
  if (program.mesh.empty()) program.mesh.push_back({options.axis, options.ranks});
  resident = resident || options.ranks == 1;
  int64_t finest = 1;
  if (program.stage && program.stage->unlike()) {
    if (const Result<stages::Recut> recut = stages::Recut::Of(program); recut.ok()) finest = recut->Finest();
  }
  std::vector<ValueId> home(program.num_values(), kNone);  // by parameter: the state it lies in
  for (Param& param : program.params) {
    const Type& type = program.value(param.value).type;
    int64_t count = *Elements(type);
    // Not less than one block, so that a unit of an empty parameter is no special case anywhere.
    int64_t shard = std::max(RoundUp((count + options.ranks - 1) / options.ranks, kUnitAlignment), kUnitAlignment);
    if (options.parts) shard = RoundUp(shard, kUnitAlignment * options.copies);
    if (!param.shared.empty() && finest > 1)  // stages of unlike ranks exchange pieces of it
      shard = std::max(RoundUp(count, kUnitAlignment * finest), kUnitAlignment * finest) / options.ranks;
    Unit unit{static_cast<UnitId>(program.units.size()),
              options.axis,
              type.dtype,
              shard * options.ranks,
              shard,
              options.replicas,
              options.parts ? shard / options.copies : 0};
    param.unit = unit.id;
    param.unit_offset = 0;
    ValueId state = program.AddState(unit.id, resident ? "full" : "shard",
                                     FlatType(unit.dtype, resident ? unit.numel : shard), true);
    if (resident) home[param.value] = state;
    program.units.push_back(std::move(unit));
  }
  program.level = Level::kSharded;
  if (!resident) return;
  for (const Phase& phase : program.phases) {  // nothing is gathered, so the casts stay what they are
    for (OpId id : phase.ops)
      std::erase_if(program.op(id).attrs, [](const NamedArg& attr) { return attr.name == kOnShard; });
  }
  for (ValueId id = 0; id < static_cast<ValueId>(home.size()); ++id) {
    // A value's root may have moved already only when it is the parameter itself.
    if (program.HasValue(id) && home[program.RootOf(id)] != kNone) program.value(id).root = home[program.RootOf(id)];
  }
}

}  // namespace interlace
