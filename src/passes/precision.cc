// precision.cc — what travels between ranks is narrower than the master weights: parameters are cast on their shards
// before the gather, gradients are reduced in a narrower dtype.
//   before: %c: bf16[8] = aten._to_copy(%w, dtype=bf16) {fwd}       %d: f32[8] = aten._to_copy(%g, dtype=f32) {bwd}
//           ... = aten.mm(%x, %c) {fwd}                              grad(%w, %d) {bwd}
//   after:  %c: bf16[8] = aten._to_copy(%w, dtype=bf16) {fwd on_shard=true}
//           ... = aten.mm(%x, %c) {fwd}                              grad(%w, %g) {bwd}
// and what shard makes of that (after replicate, zero1 and with one rank, the casts stay where they are used first):
//   %s: bf16[shard] = copy(%shard)                                  %g into %flat+0 = ...       flat is bf16[numel]
//   %f: bf16[numel] = gather.start(%s)                              %r: bf16[shard] = reduce.start(%flat)
//   gather.wait(%f)                                                 reduce.wait(%r)
//   ... = aten.mm(%x, view of %f)   release(%f)                     %p: f32[shard] into %grad+0 = copy(%r)
//
// A parameter's casts move when each of its uses, in forward and backward, is the same cast and nothing else; a
// parameter that is also used as it is keeps its wide gather. Casting before or after the gather gives the same bits.
// Reducing in a narrower dtype does not: each rank's gradient is rounded once (not at all when it was computed in that
// dtype), the sum over ranks is made in f32 and rounded once; shards are widened before they are added up over
// micro-batches. Runs on a captured program, before shard, replicate or zero1. Sources: SimpleFSDP section 3 and
// FSDP2's MixedPrecisionPolicy.
//
// Options: param=none|bf16|f16|auto (casts to it move; auto: to either), reduce=none|f32|bf16|f16 (none and f32: as the
// gradient was captured). Error: the program has units already; param= is given, but no parameter is used through such
// casts alone.
#include <algorithm>
#include <optional>

#include "passes/passes.h"
#include "passes/phase_editor.h"
#include "passes/sharding.h"

namespace interlace {
namespace {

std::optional<DType> DTypeOf(const std::string& word) {
  if (word == "bf16") return DType::kBF16;
  if (word == "f16") return DType::kF16;
  return std::nullopt;
}

class Narrower {
 public:
  Narrower(Program& program, Phase& phase)
      : program_(program), phase_(phase), facts_(program, phase), edit_(program, phase) {}

  // Marks the casts of parameters to one of `dtypes` that can be made on shards. Returns how many parameters have such
  // casts.
  int64_t MarkCasts(const std::vector<DType>& dtypes) {
    int64_t parameters = 0;
    for (const Param& param : program_.params) {
      std::vector<int32_t> casts;
      for (DType dtype : dtypes) {
        if (casts.empty()) casts = CastsOf(param, dtype);
      }
      for (int32_t index : casts) {
        Op& op = edit_.op(index);
        changed_ = changed_ || op.Attr(kOnShard) == nullptr;
        op.SetAttr(kOnShard, Arg::Bool(true));
        Sink(index);
      }
      parameters += casts.empty() ? 0 : 1;
    }
    return parameters;
  }

  // Gradients that are wider than `dtype` are handed over in it.
  void NarrowGradients(DType dtype) {
    std::vector<int32_t> uses(program_.num_values(), 0);
    for (int32_t i = 0; i < edit_.size(); ++i) {
      ForEachOperand(std::as_const(edit_.op(i)), [&](ValueId id) { ++uses[id]; });
    }
    for (int32_t i = 0; i < edit_.size(); ++i) {
      Op& op = edit_.op(i);
      if (op.kind != OpKind::kGrad) continue;
      ValueId value = op.args[1].value;
      const Type& type = program_.value(value).type;
      if (DTypeBytes(type.dtype) <= DTypeBytes(dtype)) continue;
      changed_ = true;
      op.args[1].value = Narrow(value, dtype, i);
      bool only_here = uses[value] == 1 && facts_.def[value] >= 0 && op.args[1].value == CastSource(value, dtype);
      if (only_here) edit_.Remove(facts_.def[value]);
    }
  }

  bool Finish() {
    if (changed_) edit_.Finish();
    return changed_;
  }

 private:
  // The casts that are all of the parameter's uses, or nothing.
  std::vector<int32_t> CastsOf(const Param& param, DType dtype) const {
    std::vector<int32_t> casts;
    for (int32_t index : facts_.uses[param.value]) {
      const Op& op = program_.op(phase_.ops[index]);
      if (IsPureView(program_, op)) continue;
      if (op.kind == OpKind::kGrad && program_.RootOf(op.args[1].value) != param.value) continue;
      if (!IsMovableCast(op, param, dtype)) return {};
      casts.push_back(index);
    }
    return casts;
  }

  // The result has the elements of the parameter in the parameter's order, and nobody writes it.
  bool IsMovableCast(const Op& op, const Param& param, DType dtype) const {
    if (!IsCast(op)) return false;
    const Value& from = program_.value(op.args[0].value);
    const Value& to = program_.value(op.results[0]);
    return from.type.dtype == program_.value(param.value).type.dtype && from.offset == Dim(0) &&
           to.type.dtype == dtype && SameGeometry(from.type, to.type) &&
           DTypeBytes(from.type.dtype) > DTypeBytes(dtype) && facts_.writes[to.id].empty();
  }

  static bool IsCast(const Op& op, const Program& program) {
    if (op.name != "aten._to_copy" || op.args.size() != 1 || op.args[0].kind != Arg::Kind::kValue || op.rng)
      return false;
    if (op.results.size() != 1 || op.results[0] == kNone || program.RootOf(op.results[0]) != op.results[0])
      return false;
    // A device or a layout would be more than a cast.
    return std::all_of(op.named.begin(), op.named.end(), [](const NamedArg& named) {
      return named.name == "dtype" || named.name == "memory_format" || named.name == "non_blocking" ||
             named.arg.kind == Arg::Kind::kNone;
    });
  }
  bool IsCast(const Op& op) const { return IsCast(op, program_); }

  // Moves a cast to its first use, so that where it stays it does not hold memory before.
  void Sink(int32_t index) {
    const std::vector<int32_t>& uses = facts_.uses[edit_.op(index).results[0]];
    if (uses.empty() || uses[0] <= index + 1) return;
    int32_t to = uses[0];
    bool only_casts = true;  // several casts in front of one use stay where they are
    for (int32_t i = index + 1; i < to; ++i) only_casts = only_casts && edit_.op(i).Attr(kOnShard) != nullptr;
    if (only_casts) return;
    edit_.Remove(index);
    edit_.Before(to, edit_.op(index).id);
    changed_ = true;
  }

  // What `value` is a cast of, when that has the dtype; else kNone.
  ValueId CastSource(ValueId value, DType dtype) const {
    if (program_.RootOf(value) != value || facts_.def[value] < 0 || !facts_.writes[value].empty()) return kNone;
    const Op& op = program_.op(phase_.ops[facts_.def[value]]);
    if (!IsCast(op)) return kNone;
    const Value& from = program_.value(op.args[0].value);
    bool read_later = !facts_.writes[from.root].empty() && facts_.writes[from.root].back() > facts_.def[value];
    return from.type.dtype == dtype && !read_later ? from.id : kNone;
  }

  ValueId Narrow(ValueId value, DType dtype, int32_t marker) {
    if (ValueId source = CastSource(value, dtype); source != kNone) return source;
    Op& cast = AddLike(program_, edit_.op(marker), "aten._to_copy", {value});
    cast.named = {{"dtype", Arg::Word(std::string(DTypeName(dtype)))}};
    Type type = program_.value(value).type;
    type.dtype = dtype;
    ValueId narrow = program_.AddResult(cast, std::move(type));
    // As soon as the gradient is complete, so that its reduction need not wait for the markers.
    int32_t done = facts_.def[value];
    for (int32_t write : facts_.writes[program_.RootOf(value)]) {
      if (write < marker) done = std::max(done, write);
    }
    done >= 0 && done < marker ? edit_.After(done, cast.id) : edit_.Before(marker, cast.id);
    return narrow;
  }

  Program& program_;
  Phase& phase_;
  PhaseFacts facts_;
  PhaseEditor edit_;
  bool changed_ = false;
};

}  // namespace

Result<bool> Precision(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(std::string param, options.Choice("param", {"none", "bf16", "f16", "auto"}));
  INTERLACE_ASSIGN(std::string reduce, options.Choice("reduce", {"none", "f32", "bf16", "f16"}));
  if (program.width > 1) return MakeError("micro-batches run side by side already; run precision before breadth_first");
  Phase* phase = program.MicroBatchPhase();
  if (phase == nullptr) return MakeError("the program has no phase micro_batch");
  Narrower narrower(program, *phase);
  std::vector<DType> dtypes;
  if (std::optional<DType> dtype = DTypeOf(param)) dtypes = {*dtype};
  if (param == "auto") dtypes = {DType::kBF16, DType::kF16};
  if (!dtypes.empty() && narrower.MarkCasts(dtypes) == 0) {
    return MakeError("no parameter is used only through casts to ", param == "auto" ? "bf16 or f16" : param,
                     ", so none can be gathered in it; capture with Config(param_dtype=...) or under torch.autocast");
  }
  if (std::optional<DType> dtype = DTypeOf(reduce)) narrower.NarrowGradients(*dtype);
  return narrower.Finish();
}

}  // namespace interlace
