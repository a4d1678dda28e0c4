// cut.cc — pass `pipeline`: keeps one stage of a captured program, with phases of its own for forward and backward part
// and messages to and from the other stages. The same call with another `stage` gives the texts of a program set.
//   before: phase micro_batch: %5 = mm(%x, %w)   %6 = mm(%5, %v) | %7 = mm(%g, %v) {bwd}   %8 = mm(%x, %7) {bwd}  grad(%w, %8)
//   after, stage 0: phase forward saves (%5 as v5, %t as sent.v5):   phase backward loads (... of v5, %t of sent.v5):
//                     %5 = mm(%x, %w)                                  send.wait(%t)
//                     %t = send.start(%5) {axis=pp peer=1}             %7 = recv.start() {axis=pp peer=1}   recv.wait(%7)
//                                                                      %8 = mm(%x, %7)   grad(%w, %8)
// A message that goes up is waited for in the backward part of the same micro-batch, where it must have arrived, one
// that goes down in a phase that does nothing else: nobody stands still for it, and `order` says when. What other
// stages need is found by dataflow (flow.h, messages.h), so any value may cross, also several stages at once; what is
// cheap to repeat is made where it is used. A parameter that stages share (tied weights) is on all of their ranks,
// which add up their parts of its gradient when the step ends (pass `update`). Stages of unlike ranks re-cut what
// crosses by rows (recut.h); where they cut products, too, pass `borders` comes before `tensor`. Options: axis, stage,
// at=auto|model|NAMES, chunks, deal, gathers=once|again|auto (again: gather_again.h), micro_batches,
// backward=whole|split, data, limit, cluster, profile (for at, deal and gathers). Runs after canonicalize,
// mesh, tensor, precision and recompute, before the strategy. Error: no such axis, more stages than borders, a value
// that cannot be sent, random numbers in program order.
#include <algorithm>
#include <array>
#include <limits>
#include <optional>

#include "base/scan.h"
#include "cost/kernel_model.h"
#include "ir/op_table.h"
#include "ir/text.h"
#include "passes/cost_options.h"
#include "passes/passes.h"
#include "passes/stages/buffers.h"
#include "passes/stages/coalesced.h"
#include "passes/stages/gather_again.h"
#include "passes/stages/messages.h"
#include "passes/stages/played.h"
#include "passes/stages/stage_times.h"
#include "passes/stages/stage_writer.h"
#include "passes/tensor/plan.h"

namespace interlace {
namespace {

Status CheckCuttable(const Program& program, const Phase& phase) {
  const std::string* rng = program.Meta("rng");
  for (OpId id : phase.ops) {
    const Op& op = program.op(id);
    const auto refuse = [&](const std::string& why) { return Error{why, PrintOp(program, op)}; };
    if (op.rng && rng != nullptr && *rng == "compat")
      return refuse("random numbers come in the order of the program (rng=compat); use rng=keyed");
    if (op.kind != OpKind::kCallPython) continue;
    return refuse("a module that runs in Python keeps objects that cannot be sent; a pipeline needs a model without");
  }
  return Ok{};
}

// How what crosses depends on rows: as the meta line says, which the stage with the most rows has written first.
Status FollowRows(Program& program, const Phase& phase, const stages::Flow& flow, const stages::Layout& layout,
                  stages::Unlike& unlike) {
  const std::vector<ValueId> roots = stages::CrossingRoots(program, layout);
  unlike.names = stages::NamesOf(program, phase, roots);
  program.SetMeta(stages::kStagesData, unlike.recut.Text());
  if (unlike.recut.SameRows()) {
    program.SetMeta(stages::kStagesRows, "");
    program.SetMeta(stages::kStagesMean, std::to_string(unlike.recut.data(0)));
    return Ok{};
  }
  if (const std::string* known = program.Meta(stages::kStagesRows)) {
    INTERLACE_ASSIGN(const auto by_name, stages::ReadCrossings(*known));
    for (const ValueId root : roots) {
      const auto found = by_name.find(unlike.names.at(root));
      if (found == by_name.end())
        return MakeError("'", unlike.names.at(root),
                         "' goes from stage to stage here, and not in the program for micro-batches of more rows; give "
                         "all stages the same dp, or choose other borders");
      unlike.crossings[root] = found->second;
    }
  } else {
    INTERLACE_ASSIGN(unlike.crossings, stages::FindCrossings(program, phase, roots));
    program.SetMeta(stages::kStagesRows, stages::PrintCrossings(unlike.crossings, unlike.names));
  }
  for (const stages::Message& message : layout.messages) {
    const auto crossing = unlike.crossings.find(message.root);
    if (crossing == unlike.crossings.end()) continue;
    if (crossing->second.kind == stages::Crossing::Kind::kSum && message.from.turn == stages::Turn::kForward)
      return MakeError(
          "%", message.root, ", made by ", flow.op(flow.DefOf(message.root)).name,
          ", is a sum over all rows of a micro-batch, which stages of unlike ranks have different ones of; "
          "give stages ",
          message.from.stage, " and ", message.to.stage, " the same dp, or choose another border");
  }
  int64_t mean = layout.deal.ranks - 1;
  for (int32_t i = 0; i < flow.size(); ++i) {
    const Arg* name = flow.op(i).kind == OpKind::kOutput ? flow.op(i).Attr("name") : nullptr;
    if (name != nullptr && name->text == "loss" && layout.stage[i] >= 0) mean = layout.RankOf(layout.stage[i]);
  }
  program.SetMeta(stages::kStagesMean, std::to_string(unlike.recut.data(mean)));
  return Ok{};
}

// Whether ranks of stages that cut products over other numbers of ranks can exchange what they have to.
Status CheckTensor(const Program& program, const stages::Layout& layout, const stages::Recut& recut,
                   const std::map<ValueId, std::string>& names) {
  for (const stages::Message& message : layout.messages) {
    const int64_t from = layout.RankOf(message.from.stage), to = layout.RankOf(message.to.stage);
    if (recut.tensor(from) == recut.tensor(to)) continue;
    const Value& value = program.value(message.root);
    const Arg* mark = value.kind == ValueKind::kResult ? program.op(value.def).Attr(stages::kMark) : nullptr;
    if (mark != nullptr && program.op(value.def).kind == OpKind::kCopy) continue;
    const auto name = names.find(message.root);
    std::string what = name == names.end() ? "%" + std::to_string(message.root) : name->second;
    bool whole = false;
    for (const Param& param : program.params) {
      if (param.value == message.root) what = param.name, whole = tensor::StaysWhole(program, param);
    }
    if (whole) continue;
    return MakeError("'", what, "' goes from stage ", from, " to stage ", to, ", which cut products over ",
                     recut.tensor(from), " and ", recut.tensor(to),
                     " ranks, and is not whole; give both the same tp, or choose other borders");
  }
  for (const auto& [param, ranks] : layout.shared) {
    for (const int64_t rank : ranks) {
      if (recut.tensor(rank) == recut.tensor(ranks[0])) continue;
      const auto named = std::find_if(program.params.begin(), program.params.end(),
                                      [&, of = param](const Param& p) { return p.value == of; });
      if (tensor::StaysWhole(program, *named)) continue;
      return MakeError("'", named->name, "' is used by stages ", ranks[0], " and ", rank, ", which cut products over ",
                       recut.tensor(ranks[0]), " and ", recut.tensor(rank),
                       " ranks and cannot add up their parts of its gradient; give both the same tp");
    }
  }
  return Ok{};
}

struct Dealt {
  std::vector<stages::Border> borders;
  stages::Layout layout;
  std::optional<stages::Measured> measured;           // nullopt: sizes are not numbers yet
  bool fits = false;                                  // of the order that ends first,
  int64_t end = std::numeric_limits<int64_t>::max();  // when it does; the largest: nobody looked
  bool IsBetterThan(const Dealt& other) const { return fits == other.fits ? end < other.end : fits; }
};

// Stages, and who has which.
struct Dealing {
  const Program& program;
  const stages::Flow& flow;
  CostModel& model;
  const PassCosts& costs;
  const std::string& axis;
  const bool split;
  const int64_t micro_batches;             // of a step; 0: not known yet
  std::optional<stages::Measured>& plain;  // the first with one stage a rank

  // It may take as much memory as `plain` does as 1F1B and, where the memory of a rank is known, what there is of it
  // beside parameters, gradients, two moments and a copy in another dtype that nobody shares.
  Result<Dealt> As(const stages::Deal& deal, const std::string& at) const {
    Dealt out;
    INTERLACE_ASSIGN(out.borders, stages::ChosenBorders(program, flow, at, deal, model, axis));
    INTERLACE_ASSIGN(out.layout, stages::MakeLayout(program, flow, stages::StagesOf(flow, out.borders), deal, split));
    Result<stages::Measured> measured = stages::Measure(program, flow, out.layout, out.borders, model, costs, axis);
    if (!measured.ok()) return out;
    out.measured = std::move(*measured);
    if (deal.chunks == 1 && !plain) plain = out.measured;
    if (!plain) return out;
    std::vector<int64_t>& room = out.measured->pipe.room;
    if (micro_batches > 0) room = stages::RoomOf1F1B(*plain, *out.measured, micro_batches, program.AxisSize("dp"));
    if (costs.limit < std::numeric_limits<int64_t>::max()) {
      for (size_t r = 0; r < room.size(); ++r)
        room[r] = std::max(room[r], costs.limit / 10 * 9 - 5 * out.measured->of_params[r]);
    }
    // What a backward part has sent is there for some micro-batches more, until the last stage takes it.
    double sent = 0;
    for (const stages::Border& border : out.borders) sent += border.back / 2;  // of one, times ranks
    for (int64_t& bytes : room) bytes = std::max<int64_t>(bytes - (deal.v ? static_cast<int64_t>(sent) : 0), 0);
    return out;
  }

  void Judge(Dealt& dealt) const {
    if (!dealt.measured || micro_batches == 0) return;
    const stages::Pipe& pipe = dealt.measured->pipe;
    const stages::Lists lists = stages::FastestSchedule(pipe, micro_batches);
    dealt.fits = stages::Fits(lists, pipe), dealt.end = stages::Play(lists, pipe);
  }

  // One stage a rank, or two as a V where a step then ends earlier within the room there is.
  Result<Dealt> Fastest(int64_t ranks, const std::string& at) const {
    Result<Dealt> straight = As({ranks}, at);
    if (straight.ok() && at != "auto") return straight;
    INTERLACE_ASSIGN(Dealt one, straight.ok() ? std::move(straight) : As({ranks}, "auto"));
    Result<Dealt> v = As({ranks, 2, true}, at);
    const bool of_v = std::count(at.begin(), at.end(), '+') + 2 == 2 * ranks;  // borders for as many stages
    if (at != "auto") return v.ok() || of_v ? std::move(v) : std::move(straight);
    Judge(one);
    if (!v.ok()) return one;
    Judge(*v);
    return v->fits && v->IsBetterThan(one) ? std::move(v) : std::move(one);
  }
};

}  // namespace

Result<bool> Pipeline(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(const std::string axis, options.Name("axis", "pp"));
  INTERLACE_ASSIGN(const int64_t rank, options.Int("stage", 0, 0));
  INTERLACE_ASSIGN(const int64_t chunks, options.Int("chunks", 1, 1));
  INTERLACE_ASSIGN(const std::string backward, options.Choice("backward", {"whole", "split"}));
  Phase* found = program.MicroBatchPhase();
  const bool unlike = program.stage && program.stage->unlike();  // as pass `mesh` has said
  if (program.level != Level::kCaptured || found == nullptr || (program.stage && (!unlike || program.Meta("stages"))))
    return MakeError("pipeline cuts a captured program with a single micro-batch phase, before the strategy");
  const bool known =
      std::any_of(program.mesh.begin(), program.mesh.end(), [&](const Axis& a) { return a.name == axis; });
  if (!known) return MakeError("the mesh has no axis '", axis, "'; declare it first: mesh(axes=", axis, ":2)");
  const int64_t ranks = unlike ? program.Stages() : program.AxisSize(axis);
  INTERLACE_ASSIGN(std::vector<int64_t> data, options.Counts("data"));
  std::optional<stages::Unlike> recut;
  if (unlike != !data.empty() || (unlike && (program.stage->index != rank || program.stage->axis != axis)))
    return MakeError(
        "data= is of stages with unlike ranks, which pass mesh declares: mesh(axes=...,stages=...,stage=", rank, ")");
  if (unlike) {
    INTERLACE_ASSIGN(stages::Recut who, stages::Recut::Of(*program.stage, std::move(data)));
    recut = stages::Unlike{std::move(who), {}, {}};
  }
  if (rank >= ranks) return MakeError("stage=", rank, " of ", ranks, "; they count from 0");
  constexpr int64_t kMostChunks = 64;
  if (chunks > kMostChunks) return MakeError("chunks=", chunks, " is more than ", kMostChunks);
  INTERLACE_ASSIGN(const int64_t micro_batches, options.Int("micro_batches", 0, 0));
  stages::TakeApart(program, *found);
  stages::ChangeBuffersForward(program, *found);
  INTERLACE_TRY(CheckCuttable(program, *found));
  INTERLACE_ASSIGN(const PassCosts costs, ReadCosts(program, options));
  INTERLACE_ASSIGN(const std::string how, options.Choice("deal", {"turns", "v", "auto"}));
  if (how == "v" && chunks != 2)
    return MakeError("deal=v gives each rank two stages, not ", chunks, "; write chunks=2");
  if (how != "turns" && unlike)
    return MakeError("deal=", how, " gives ranks two stages, which needs stages with as many ranks each");
  const std::string at = options.Text("at", "auto");
  std::optional<stages::Measured> plain;
  const auto deal = [&](const Program& of) -> Result<Dealt> {
    const Phase& whole = *of.MicroBatchPhase();
    const stages::Flow flow(of, whole);
    INTERLACE_ASSIGN(CostModel model, costs.Model(of));
    const Dealing dealing{of, flow, model, costs, axis, backward == "split", micro_batches, plain};
    return how == "auto" ? dealing.Fastest(ranks, at) : dealing.As({ranks, chunks, how == "v"}, at);
  };
  INTERLACE_ASSIGN(const std::string gathers, options.Choice("gathers", {"once", "again", "auto"}));
  INTERLACE_ASSIGN(Dealt dealt, deal(program));
  bool again = false;
  const bool judged = gathers == "auto" && dealt.end < std::numeric_limits<int64_t>::max();
  if (backward == "split" && (judged || gathers == "again")) {
    Program other = program.Clone();
    if (stages::GatherAgain(other, *other.MicroBatchPhase(), dealt.layout.turn) > 0) {
      INTERLACE_ASSIGN(Dealt its, deal(other));
      again = !judged || its.IsBetterThan(dealt);
      if (again) dealt = std::move(its), program = std::move(other);
    }
  }
  const Phase phase = *program.MicroBatchPhase();
  const stages::Flow flow(program, phase);
  const stages::Layout& layout = dealt.layout;
  if (layout.Channels() > kMostChannels)
    return MakeError("values that skip stages need ", layout.Channels(), " channels between two ranks, and there are ",
                     kMostChannels, "; give each rank fewer stages than ", chunks);
  std::string text;
  for (const stages::Border& border : dealt.borders) text += (text.empty() ? "" : "+") + border.param;
  if (recut) INTERLACE_TRY(FollowRows(program, phase, flow, layout, *recut));
  if (recut) INTERLACE_TRY(CheckTensor(program, layout, recut->recut, recut->names));
  INTERLACE_TRY(stages::WriteStage(program, flow, layout, recut ? &*recut : nullptr, axis, static_cast<int32_t>(rank)));
  for (Phase& part : program.phases) {
    if (again) stages::StartAhead(program, part);
    stages::PutTogether(program, part);
  }
  program.SetMeta("stages", text);
  if (again) program.SetMeta("stages.gathers", "again");
  if (layout.Channels() > layout.deal.chunks)
    program.SetMeta(std::string(kStagesChannels), std::to_string(layout.Channels()));
  for (const Phase& part : program.phases) {
    for (OpId id : part.ops) {
      if (std::as_const(program).op(id).Attr(stages::kStage) == nullptr) continue;
      std::erase_if(program.op(id).attrs,
                    [](const NamedArg& attr) { return attr.name == stages::kStage || attr.name == stages::kMark; });
    }
  }
  // Of stages with unlike ranks the first that is made tells the others.
  if (dealt.measured && program.Meta("stages.times") == nullptr) stages::WritePipe(program, dealt.measured->pipe);
  stages::WriteDeal(program, layout);
  if (!recut) program.stage = StageOf{axis, rank};
  program.Compact();
  return true;
}

}  // namespace interlace
