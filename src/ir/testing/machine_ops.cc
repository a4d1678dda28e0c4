// One op on all ranks in lockstep, so a collective simply reads every rank's memory.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "base/exact_sum.h"
#include "ir/func.h"
#include "ir/op_table.h"
#include "ir/pending.h"
#include "ir/testing/aten_kernels.h"
#include "ir/testing/evaluate_rule.h"
#include "ir/testing/machine.h"
#include "ir/testing/optimizers.h"

namespace interlace::testing {
namespace {

double NumberAttr(const Op& op, std::string_view name, double fallback) {
  const Arg* arg = op.Attr(name);
  if (arg == nullptr) return fallback;
  if (arg->kind == Arg::Kind::kFloat) return arg->real;
  if (arg->kind == Arg::Kind::kInt) return static_cast<double>(arg->integer.value);
  return fallback;
}

}  // namespace

Status Machine::DefineResults(const Op& op) {
  for (ValueId id : op.results) {
    if (id == kNone || program_.RootOf(id) != id) continue;
    for (int64_t rank = 0; rank < ranks_; ++rank) INTERLACE_TRY(Allocate(rank, id));
  }
  return Ok{};
}

Status Machine::RunOp(const Op& op) {
  if (!IsPending(op)) return IsOwn(op) ? RunOwnOp(op) : RunLibraryOp(op);
  if (step_ == 0) return Ok{};  // nothing came before
  INTERLACE_TRY(RunOwnOp(op));
  for (const auto& [root, by] : pending_) {  // a gradient ends with its update
    for (int64_t rank = 0; by == op.id && rank < ranks_; ++rank) INTERLACE_TRY(Allocate(rank, root));
  }
  return Ok{};
}

Status Machine::RunLibraryOp(const Op& op) {
  bool views =
      !op.results.empty() && op.writes.empty() && std::all_of(op.results.begin(), op.results.end(), [&](ValueId id) {
        return id != kNone && program_.RootOf(id) != id && !program_.value(id).placed;
      });
  if (views) return Ok{};
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    if (op.kind == OpKind::kCall) {
      INTERLACE_TRY(RunCall(op, rank));
      continue;
    }
    Status read_status = Ok{};
    AtenCall call{op,
                  [&](ValueId id) {
                    Result<Dense> x = Read(rank, id);
                    if (x.ok()) return *x;
                    read_status = x.error();
                    return Dense{Sizes(id), std::vector<double>(Count(Sizes(id)), 0.0)};
                  },
                  {},
                  0};
    call.integer = [&](Dim dim) {
      const Result<int64_t> value = program_.dims.Evaluate(dim, rank_symbols_[rank]);
      if (!value.ok()) read_status = value.error();
      return value.ok() ? *value : 0;
    };
    if (op.rng) {
      uint64_t key = Mix(Mix(Mix(options_.seed, step_), micro_batch_ + MicroBatchOf(op)), DataRank(rank));
      call.random_key = Mix(key, static_cast<uint64_t>(*op.rng));
    }
    const std::vector<ValueId>& targets = op.writes.empty() ? op.results : op.writes;
    for (ValueId id : targets) call.result_sizes.push_back(id == kNone ? std::vector<int64_t>{} : Sizes(id));
    if (!targets.empty() && targets[0] != kNone) call.dtype = program_.value(targets[0]).type.dtype;
    INTERLACE_ASSIGN(std::vector<Dense> results, RunAten(call));
    INTERLACE_TRY(read_status);
    for (size_t i = 0; i < targets.size() && i < results.size(); ++i) {
      if (targets[i] == kNone) continue;
      if (op.writes.empty() && program_.RootOf(targets[i]) == targets[i]) INTERLACE_TRY(Allocate(rank, targets[i]));
      INTERLACE_TRY(Write(rank, targets[i], results[i]));
    }
  }
  return Ok{};
}

// The body on a machine of its own.
Status Machine::RunCall(const Op& op, int64_t rank) {
  const int32_t index = FuncOf(program_, op);
  if (index == kNone) return MakeError(op.name, " calls no func of this program");
  const Func& func = program_.funcs[index];
  const std::vector<ValueId> operands = OperandsOf(func);
  Machine inside(*func.body, options_, 1);
  INTERLACE_TRY(inside.Init());
  for (size_t i = 0; i < operands.size(); ++i) {
    INTERLACE_ASSIGN(const Dense x, Read(rank, op.args[i].value));
    INTERLACE_TRY(inside.Write(0, operands[i], x));
  }
  INTERLACE_TRY(inside.RunPhase(func.body->phases[0]));
  for (size_t i = 0; i < op.results.size(); ++i) {
    const ValueId id = op.results[i];
    if (id == kNone) continue;
    if (program_.RootOf(id) == id) INTERLACE_TRY(Allocate(rank, id));
    INTERLACE_ASSIGN(const Dense x, inside.Read(0, GivenBy(func)[i]));
    INTERLACE_TRY(Write(rank, id, x));
  }
  return Ok{};
}

Status Machine::RunOwnOp(const Op& op) {
  const OpTraits& traits = TraitsOf(op);
  if (const Move* move = MoveOf(op)) return Relocate(op, *move);
  if (traits.side == Side::kStart) return Start(op);
  if (traits.side == Side::kWait) return Wait(op);
  switch (op.kind) {
    case OpKind::kView:
      return Ok{};
    case OpKind::kRelease:
      ForEachOperand(op, [&](ValueId id) {
        for (int64_t rank = 0; rank < ranks_; ++rank) storage_[rank][id] = {};
      });
      return Ok{};
    case OpKind::kGradBegin:
      return GradBegin(op);
    case OpKind::kNormPartial:
      return NormPartial(op);
    case OpKind::kNormCoef:
      return NormCoef(op);
    case OpKind::kUpdateAdamW:
    case OpKind::kUpdateAdam:
    case OpKind::kUpdateSgd:
    case OpKind::kUpdateRule:
      return StepsOnHost(op) ? UpdateOnHost(op) : Update(op);
    case OpKind::kGrad:
    case OpKind::kOutput:
      return Mark(op);
    case OpKind::kAssign:
      return Copy(op, op.args[1].value, op.args[0].value);
    case OpKind::kCopy:
      return Copy(op, op.args[0].value, op.results[0]);
    default:
      return MakeError("the interpreter lacks ", op.name);
  }
}

Status Machine::Mark(const Op& op) {
  std::vector<Dense> values;
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    INTERLACE_ASSIGN(Dense x, Read(rank, op.args.back().value));
    values.push_back(std::move(x));
  }
  if (op.kind == OpKind::kGrad) {
    grads[op.args[0].value] = std::move(values);
    return Ok{};
  }
  const Arg* name = op.Attr("name");
  std::vector<Dense>& kept = outputs[name == nullptr ? "" : name->text];
  std::move(values.begin(), values.end(), std::back_inserter(kept));
  return Ok{};
}

Status Machine::Copy(const Op& op, ValueId from, ValueId to) {
  INTERLACE_TRY(DefineResults(op));
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    INTERLACE_ASSIGN(Dense x, Read(rank, from));
    INTERLACE_TRY(Write(rank, to, x));
  }
  return Ok{};
}

// The tier gets its copy at the start and memory ends at the wait; the other way memory is poison until the wait.
Status Machine::Relocate(const Op& op, const Move& move) {
  for (const Arg& arg : op.args) {
    const ValueId id = arg.value;
    if ((move.to == Place::kLeaving && !IsClean(op)) || IsFresh(op)) away_[id].resize(ranks_);
    const bool given_up =
        move.to == Place::kOut || (move.to == Place::kLeaving && IsClean(op));  // it may come back as fresh memory
    if (!given_up && !away_.contains(id)) return MakeError("%", id, " is not in the tier");
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      if (move.to == Place::kLeaving) {
        if (IsClean(op)) continue;
        INTERLACE_ASSIGN(away_[id][rank], ReadBytes(rank, id));
      } else if (move.to == Place::kOut) {
        storage_[rank][id] = {};
      } else if (move.to == Place::kComing) {
        INTERLACE_TRY(Allocate(rank, id));
        if (IsFresh(op)) away_[id][rank] = *ReadBytes(rank, id);  // what comes is the poison of new memory
      } else {
        INTERLACE_TRY(WriteBytes(rank, id, away_[id][rank]));
      }
    }
  }
  return Ok{};
}

Status Machine::GradBegin(const Op& op) {
  INTERLACE_TRY(DefineResults(op));
  const Unit& unit = program_.units[op.units[0]];
  const Arg* zero = op.Attr("zero");
  Dense flat{{unit.numel}, std::vector<double>(unit.numel, 0.0)};
  if (zero == nullptr || !zero->boolean) {
    DType dtype = program_.value(op.results[0]).type.dtype;
    for (const Param& param : program_.params) {
      if (param.unit != unit.id) continue;
      auto begin = flat.data.begin() + param.unit_offset;
      std::fill(begin, begin + Count(Sizes(param.value)), Poison(dtype));
    }
  }
  for (int64_t rank = 0; rank < ranks_; ++rank) INTERLACE_TRY(Write(rank, op.results[0], flat));
  return Ok{};
}

Status Machine::NormPartial(const Op& op) {
  INTERLACE_TRY(DefineResults(op));
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    ExactSum sum;
    for (const Arg& arg : op.args) {
      INTERLACE_ASSIGN(Dense x, Read(rank, arg.value));
      sum.AddSquares(x.data.data(), static_cast<int64_t>(x.data.size()));
    }
    Bytes limbs(sizeof(int64_t) * ExactSum::kLimbs);
    std::memcpy(limbs.data(), sum.Limbs().data(), limbs.size());
    INTERLACE_TRY(WriteBytes(rank, op.results[0], limbs));
  }
  return Ok{};
}

Status Machine::NormCoef(const Op& op) {
  INTERLACE_TRY(DefineResults(op));
  const Arg* max_norm = op.Attr("max_norm");
  bool clips = max_norm != nullptr && max_norm->kind != Arg::Kind::kNone;
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    INTERLACE_ASSIGN(Bytes limbs, ReadBytes(rank, op.args[0].value));
    int64_t words[ExactSum::kLimbs];
    std::memcpy(words, limbs.data(), sizeof(words));
    double loss_scale = 1;
    if (op.args.size() > 1) {
      INTERLACE_ASSIGN(Dense x, Read(rank, op.args[1].value));
      loss_scale = x.data[0];
    }
    norm = std::sqrt(ExactSum(words).Round()) * NumberAttr(op, "scale", 1) / loss_scale;
    double coef = clips ? std::min(1.0, NumberAttr(op, "max_norm", 0) / (norm + 1e-6)) : 1.0;
    INTERLACE_TRY(Write(rank, op.results[0], Dense{{3}, {norm, coef / loss_scale, std::isfinite(norm) ? 1.0 : 0.0}}));
  }
  return Ok{};
}

Status Machine::Update(const Op& op) {
  const std::string optimizer(TraitsOf(op).name.substr(std::string_view("update.").size()));
  const Unit& unit = program_.units[op.units[0]];
  const size_t states = FlatOperands(op) - 2;
  const Arg* ranges = op.Attr("ranges");
  if (ranges == nullptr) return MakeError(op.name, " has no ranges");
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    std::vector<Dense> flats;
    for (size_t i = 0; i < 2 + states; ++i) {
      INTERLACE_ASSIGN(Dense x, Read(rank, op.args[i].value));
      flats.push_back(std::move(x));
    }
    double factor = NumberAttr(op, "scale", 1);
    if (op.args.size() > 2 + states) {
      INTERLACE_ASSIGN(Dense coef, Read(rank, op.args[2 + states].value));
      if (coef.data[2] == 0) continue;  // a gradient that is not finite: the step is skipped
      factor *= coef.data[1];
    }
    auto count = static_cast<int64_t>(flats[0].data.size());
    int64_t first = count == unit.numel ? 0 : Coordinate(rank, unit.axis) * unit.shard;
    if (unit.parted() && count == unit.part) first += Coordinate(rank, unit.replicas) * unit.part;
    // States are stored after each range, rounded to their own dtypes.
    for (size_t r = 0; r + 2 < ranges->list.size(); r += 3) {
      int64_t begin = std::max<int64_t>(ranges->list[r].integer.value - first, 0);
      int64_t end = std::min(ranges->list[r + 1].integer.value - first, count);
      const auto group = static_cast<int32_t>(ranges->list[r + 2].integer.value);
      std::vector<double> hyper = Hyper(group, IsPending(op));
      if (const int32_t rule = program_.groups[group].rule; rule != kNone) {
        if (hyper.empty()) return MakeError("group ", group, " has no row");
        const RuleForm& form = program_.rules[rule].forms[static_cast<size_t>(hyper[0])];
        std::vector<double> registers(form.registers);
        for (int64_t i = begin; i < end; ++i) {
          for (size_t k = 0; k < flats.size(); ++k) registers[k] = flats[k].data[i] * (k == 1 ? factor : 1);
          EvaluateRule(form, std::span(hyper).subspan(1), registers);
          for (size_t k = 0; k < flats.size(); ++k) {
            if (k != 1) flats[k].data[i] = registers[k];
          }
        }
        continue;
      }
      for (int64_t i = begin; i < end; ++i) {
        INTERLACE_TRY(StepElement(optimizer, hyper, flats[1].data[i] * factor, &flats[0].data[i],
                                  states > 0 ? &flats[2].data[i] : nullptr, states > 1 ? &flats[3].data[i] : nullptr));
      }
    }
    INTERLACE_TRY(Write(rank, op.args[0].value, flats[0]));
    for (size_t i = 2; i < 2 + states; ++i) INTERLACE_TRY(Write(rank, op.args[i].value, flats[i]));
  }
  return Ok{};
}

Status Machine::UpdateOnHost(const Op& op) {
  std::vector<std::pair<int64_t, ValueId>> lifted;
  for (size_t i = 0; i < FlatOperands(op); ++i) {
    const ValueId id = op.args[i].value;
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      if (storage_[rank][id].bytes != nullptr) continue;  // a flush, which brings everything back
      if (!away_.contains(id)) return MakeError("%", id, " is not in the tier");
      INTERLACE_TRY(Allocate(rank, id));
      INTERLACE_TRY(WriteBytes(rank, id, away_[id][rank]));
      lifted.emplace_back(rank, id);
    }
  }
  INTERLACE_TRY(Update(op));
  for (const auto& [rank, id] : lifted) {
    INTERLACE_ASSIGN(away_[id][rank], ReadBytes(rank, id));
    storage_[rank][id] = {};
  }
  return Ok{};
}

}  // namespace interlace::testing
