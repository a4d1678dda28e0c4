#include "ir/testing/machine.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ir/op_table.h"
#include "ir/pending.h"
#include "ir/testing/optimizers.h"
#include "ir/text.h"

namespace interlace::testing {
namespace {

// Calls f(index in row-major order, offset in elements) for every element.
template <typename F>
void ForEachElement(const Type& type, F f) {
  size_t rank = type.sizes.size();
  int64_t count = 1;
  for (const Dim& size : type.sizes) count *= size.value;
  std::vector<int64_t> index(rank, 0);
  int64_t offset = 0;
  for (int64_t n = 0; n < count; ++n) {
    f(n, offset);
    for (size_t i = rank; i-- > 0;) {
      offset += type.strides[i].value;
      if (++index[i] < type.sizes[i].value) break;
      offset -= type.strides[i].value * type.sizes[i].value;
      index[i] = 0;
    }
  }
}

void CollectNumbers(const Arg& arg, std::vector<double>& out) {
  if (arg.kind == Arg::Kind::kFloat) out.push_back(arg.real);
  if (arg.kind == Arg::Kind::kInt) out.push_back(static_cast<double>(arg.integer.value));
  if (arg.kind == Arg::Kind::kBool) out.push_back(arg.boolean ? 1 : 0);
  for (const Arg& item : arg.list) CollectNumbers(item, out);
}

}  // namespace

Machine::Machine(const Program& program, const InterpretOptions& options, int64_t ranks, const StageOfSet* stage)
    : program_(program), options_(options), mesh_(program.mesh), ranks_(ranks) {
  for (Axis& axis : mesh_) {
    if (stage != nullptr && axis.name == stage->axis) axis.size = 1;
  }
  if (ranks_ == 0) {
    ranks_ = 1;
    for (const Axis& axis : mesh_) ranks_ *= axis.size;
  }
  if (stage != nullptr) {
    stage_axis_ = stage->axis;
    first_address_ = stage->index * ranks_;
    stages_ = program.AxisSize(stage->axis);
    mail_ = stage->mail;
  }
  storage_.resize(ranks_, std::vector<Binding>(program_.num_values()));
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    interlace::Binding symbols;
    for (const Axis& axis : mesh_) symbols["rank_" + axis.name] = Coordinate(rank, axis.name);
    if (stage != nullptr) symbols["rank_" + stage->axis] = stage->index;
    rank_symbols_.push_back(std::move(symbols));
  }
}

int64_t Machine::Coordinate(int64_t rank, std::string_view axes) const {
  return GroupOf(mesh_, axes).IndexOf(rank);
}

int64_t Machine::DataRank(int64_t rank) const {
  const auto cuts = [&](const Axis& axis) {
    return std::any_of(program_.params.begin(), program_.params.end(), [&](const Param& param) {
      return std::any_of(param.cuts.begin(), param.cuts.end(), [&](const Cut& cut) { return cut.axis == axis.name; });
    });
  };
  if (std::none_of(mesh_.begin(), mesh_.end(), cuts)) return rank;
  int64_t index = 0;
  for (const Axis& axis : mesh_) {
    if (!cuts(axis)) index = index * axis.size + Coordinate(rank, axis.name);
  }
  return index;
}

std::vector<int64_t> Machine::Peers(int64_t rank, std::string_view axes) const {
  const AxisGroup group = GroupOf(mesh_, axes);
  std::vector<int64_t> peers;
  for (int64_t i = 0; i < group.size; ++i) peers.push_back(group.BaseOf(rank) + i * group.stride);
  return peers;
}

// ---- memory ----

std::vector<int64_t> Machine::Sizes(ValueId id) const {
  std::vector<int64_t> sizes;
  for (const Dim& size : program_.value(id).type.sizes) sizes.push_back(size.value);
  return sizes;
}

Result<int64_t> Machine::ByteOffset(int64_t rank, ValueId id) const {
  const Value& value = program_.value(id);
  INTERLACE_ASSIGN(int64_t offset, program_.dims.Evaluate(value.offset, rank_symbols_[rank]));
  return offset * DTypeBytes(value.type.dtype);
}

Result<std::byte*> Machine::Address(int64_t rank, ValueId id) const {
  const Binding& binding = storage_[rank][program_.RootOf(id)];
  if (binding.bytes == nullptr)
    return MakeError("%", id, " has no storage here: it was never computed, or its storage has ended");
  INTERLACE_ASSIGN(int64_t offset, ByteOffset(rank, id));
  INTERLACE_ASSIGN(int64_t bytes, program_.StorageBytes(program_.value(id).type));
  if (binding.base + offset < 0 || binding.base + offset + bytes > static_cast<int64_t>(binding.bytes->size())) {
    return MakeError("%", id, " lies outside its storage");
  }
  return binding.bytes->data() + binding.base + offset;
}

Status Machine::Allocate(int64_t rank, ValueId root) {
  const Type& type = program_.value(root).type;
  if (!CanStore(type.dtype)) return MakeError("the interpreter has no dtype ", DTypeName(type.dtype));
  INTERLACE_ASSIGN(int64_t bytes, program_.StorageBytes(type));
  if (bytes > int64_t{1} << 30) return MakeError("%", root, " is too large for the interpreter");
  auto memory = std::make_shared<Bytes>(bytes);
  int64_t element = DTypeBytes(type.dtype);
  for (int64_t at = 0; at < bytes; at += element) Store(type.dtype, memory->data() + at, Poison(type.dtype));
  storage_[rank][root] = {std::move(memory), 0};
  return Ok{};
}

Result<Machine::Bytes> Machine::ReadBytes(int64_t rank, ValueId id) const {
  INTERLACE_ASSIGN(const std::byte* at, Address(rank, id));
  const Type& type = program_.value(id).type;
  int64_t element = DTypeBytes(type.dtype);
  Bytes out(Count(Sizes(id)) * element);
  ForEachElement(type,
                 [&](int64_t n, int64_t offset) { std::memcpy(&out[n * element], at + offset * element, element); });
  return out;
}

Status Machine::WriteBytes(int64_t rank, ValueId id, const Bytes& bytes) {
  INTERLACE_ASSIGN(std::byte * at, Address(rank, id));
  const Type& type = program_.value(id).type;
  int64_t element = DTypeBytes(type.dtype);
  if (static_cast<int64_t>(bytes.size()) != Count(Sizes(id)) * element)
    return MakeError("%", id, " gets another number of elements");
  ForEachElement(type,
                 [&](int64_t n, int64_t offset) { std::memcpy(at + offset * element, &bytes[n * element], element); });
  return Ok{};
}

Result<Dense> Machine::Read(int64_t rank, ValueId id) const {
  INTERLACE_ASSIGN(const std::byte* at, Address(rank, id));
  const Type& type = program_.value(id).type;
  int64_t element = DTypeBytes(type.dtype);
  Dense out{Sizes(id), std::vector<double>(Count(Sizes(id)))};
  ForEachElement(type, [&](int64_t n, int64_t offset) { out.data[n] = Load(type.dtype, at + offset * element); });
  return out;
}

Status Machine::Write(int64_t rank, ValueId id, const Dense& x) {
  INTERLACE_ASSIGN(std::byte * at, Address(rank, id));
  const Type& type = program_.value(id).type;
  int64_t element = DTypeBytes(type.dtype);
  if (static_cast<int64_t>(x.data.size()) != Count(Sizes(id)))
    return MakeError("%", id, " gets another number of elements");
  ForEachElement(type, [&](int64_t n, int64_t offset) { Store(type.dtype, at + offset * element, x.data[n]); });
  return Ok{};
}

// ---- first values ----

Status Machine::Init() {
  for (OpId id : PendingOps(program_)) {
    ForEachOperand(program_.op(id), [&](ValueId operand) { pending_[program_.RootOf(operand)] = id; });
  }
  for (const State& state : program_.states) {
    if (state.persistent) pending_.erase(state.value);
  }
  for (const Phase& phase : program_.phases) {
    INTERLACE_ASSIGN(liveness_[&phase], ComputeLiveness(program_, phase));
  }
  INTERLACE_TRY(InitStates());
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    for (const Param& param : program_.params) {
      bool owns = program_.RootOf(param.value) == param.value;
      if (owns && param.unit != kNone) continue;  // it exists only while its unit is gathered
      if (owns) INTERLACE_TRY(Allocate(rank, param.value));
      INTERLACE_TRY(Write(rank, param.value, InitialParam(param, rank)));
    }
    for (const Buffer& buffer : program_.buffers) {
      Dense first{Sizes(buffer.value), std::vector<double>(Count(Sizes(buffer.value)))};
      uint64_t key = Mix(options_.seed, HashText(buffer.name));
      for (size_t i = 0; i < first.data.size(); ++i) first.data[i] = Uniform(Mix(key, i)) + 0.5;
      INTERLACE_TRY(Allocate(rank, buffer.value));
      INTERLACE_TRY(Write(rank, buffer.value, first));
    }
    for (const Const& constant : program_.consts) {
      Dense data{Sizes(constant.value), {}};
      CollectNumbers(constant.data, data.data);
      INTERLACE_TRY(Allocate(rank, constant.value));
      INTERLACE_TRY(Write(rank, constant.value, data));
    }
    for (const Input& input : program_.inputs) INTERLACE_TRY(Allocate(rank, input.value));
  }
  for (const State& state : program_.states) {  // parameters in them have their values by now
    if (!state.out) continue;
    away_[state.value].resize(ranks_);
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      INTERLACE_ASSIGN(away_[state.value][rank], ReadBytes(rank, state.value));
      storage_[rank][state.value] = {};
    }
  }
  return Ok{};
}

void Machine::BeginStep(int64_t step) {
  step_ = step;
  norm = -1;
  for (const State& state : program_.states) {
    if (state.persistent || program_.RootOf(state.value) != state.value || pending_.contains(state.value)) continue;
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      (void)Allocate(rank, state.value);  // succeeded in Init
      if (!state.out) continue;
      away_[state.value][rank] = *ReadBytes(rank, state.value);
      storage_[rank][state.value] = {};
    }
  }
}

void Machine::SetInputs(int64_t micro_batch) {
  micro_batch_ = micro_batch;
  const size_t count = program_.inputs.size() / static_cast<size_t>(program_.width);
  for (size_t at = 0; at < program_.inputs.size(); ++at) {
    const Input& input = program_.inputs[at];
    const int64_t own = micro_batch + static_cast<int64_t>(at / count);  // of those side by side
    bool integer = !IsFloating(program_.value(input.value).type.dtype);
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      uint64_t key = Mix(Mix(Mix(Mix(options_.seed, HashText(input.name)), step_), own), DataRank(rank));
      Dense x{Sizes(input.value), std::vector<double>(Count(Sizes(input.value)))};
      for (size_t i = 0; i < x.data.size(); ++i) {
        double drawn = Uniform(Mix(key, i));
        x.data[i] = integer ? std::floor(drawn * static_cast<double>(options_.int_below)) : 2 * drawn - 1;
      }
      (void)Write(rank, input.value, x);  // its storage was made in Init
    }
  }
}

std::vector<double> Machine::Hyper(int32_t group, bool pending) const {
  if (const int32_t rule = program_.groups[group].rule; rule != kNone) {
    if (group < static_cast<int32_t>(options_.hyper.size())) return options_.hyper[group];
    std::vector<double> row(program_.rules[rule].RowSize());
    for (size_t i = 1; i < row.size(); ++i) row[i] = 0.05 * static_cast<double>(i);
    return row;
  }
  std::vector<double> hyper = group < static_cast<int32_t>(options_.hyper.size())
                                  ? options_.hyper[group]
                                  : DefaultHyper(program_.groups[group].optimizer);
  if (hyper.size() > kStepIndex) hyper[kStepIndex] = static_cast<double>(step_ + (pending ? 0 : 1));
  return hyper;
}

Status Machine::BringBack() {
  for (auto& [id, by_rank] : away_) {
    if (program_.value(id).kind != ValueKind::kState) continue;
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      if (storage_[rank][id].bytes != nullptr) continue;
      INTERLACE_TRY(Allocate(rank, id));
      INTERLACE_TRY(WriteBytes(rank, id, by_rank[rank]));
    }
  }
  return Ok{};
}

// ---- phases ----

Status Machine::RunPhase(const Phase& phase) {
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    for (ValueId id = 0; id < program_.num_values(); ++id) {
      ValueKind kind = program_.value(id).kind;
      if (kind == ValueKind::kResult || kind == ValueKind::kTake) storage_[rank][id] = {};
    }
  }
  flights_.clear();
  for (size_t i = 0; i < phase.takes.size(); ++i) {
    ValueId id = phase.takes[i];
    bool owns = program_.RootOf(id) == id;
    for (int64_t rank = 0; owns && rank < ranks_; ++rank) {
      if (i < given_.size()) {
        storage_[rank][id] = given_[i].storage[rank];
      } else {
        INTERLACE_TRY(Allocate(rank, id));  // before the first step nothing was handed on
      }
    }
    if (i < given_.size() && given_[i].in_flight) flights_[id] = std::move(given_[i].flight);
  }
  for (const Carried& load : phase.loads) {
    auto found = carried_.find({load.name, micro_batch_});
    if (found == carried_.end()) {
      return MakeError("phase ", phase.name, " loads '", load.name, "' of micro-batch ", micro_batch_,
                       ", which nobody saved");
    }
    Given& saved = found->second;
    for (int64_t rank = 0; rank < ranks_; ++rank) storage_[rank][load.value] = saved.storage[static_cast<size_t>(rank)];
    if (saved.in_flight) flights_[load.value] = std::move(saved.flight);
    carried_.erase(found);
  }
  const PhaseLiveness& liveness = liveness_[&phase];
  for (size_t i = 0; i < phase.ops.size(); ++i) {
    const Op& op = program_.op(phase.ops[i]);
    Status status = RunOp(op);
    if (!status.ok()) return Error{status.error().message, "phase " + phase.name + ": " + PrintOp(program_, op)};
    for (ValueId root : liveness.dies_after[i]) {
      for (int64_t rank = 0; rank < ranks_; ++rank) storage_[rank][root] = {};
    }
  }
  std::vector<Given> next(phase.gives.size());
  for (size_t i = 0; i < phase.gives.size(); ++i) {
    ValueId id = phase.gives[i];
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      Binding binding = storage_[rank][program_.RootOf(id)];
      INTERLACE_ASSIGN(int64_t offset, ByteOffset(rank, id));
      binding.base += offset;
      next[i].storage.push_back(std::move(binding));
    }
    if (auto flight = flights_.find(id); flight != flights_.end()) {
      next[i].in_flight = true;
      next[i].flight = std::move(flight->second);
      flights_.erase(flight);
    }
  }
  for (const Carried& save : phase.saves) {
    Given saved;
    for (int64_t rank = 0; rank < ranks_; ++rank) saved.storage.push_back(storage_[rank][save.value]);
    if (const auto flight = flights_.find(save.value); flight != flights_.end()) {
      saved.in_flight = true;
      saved.flight = std::move(flight->second);
      flights_.erase(flight);
    }
    if (!carried_.emplace(std::pair(save.name, micro_batch_), std::move(saved)).second) {
      return MakeError("phase ", phase.name, " saves '", save.name, "' of micro-batch ", micro_batch_, " twice");
    }
  }
  if (!flights_.empty())
    return MakeError("phase ", phase.name, " ends with %", flights_.begin()->first, " still in flight");
  given_ = std::move(next);
  return Ok{};
}

// As if another step began; what it begins with is all that runs.
Status Machine::Flush() {
  Phase phase{"flush", {}, {}, PendingOps(program_)};
  if (phase.ops.empty()) return Ok{};
  INTERLACE_TRY(BringBack());
  BeginStep(step_ + 1);
  given_.clear();
  INTERLACE_ASSIGN(liveness_[&phase], ComputeLiveness(program_, phase));
  const Status status = RunPhase(phase);
  liveness_.erase(&phase);
  return status;
}

}  // namespace interlace::testing
