// overlap.cc — orders the ops of a micro-batch so that its activations travel while something else is computed.
//   before: %g = all_gather.start(%a)                   after: %g = all_gather.start(%a)
//           all_gather.wait(%g)                                %h = all_gather.start(%b)      of the other half (split)
//           %1 = aten.mm(%g, %w)                               all_gather.wait(%g)
//           %h = all_gather.start(%b)                          %1 = aten.mm(%g, %w)           %h travels
//           all_gather.wait(%h)                                all_gather.wait(%h)
//           %2 = aten.mm(%h, %w)                               %2 = aten.mm(%h, %w)
// List scheduling (Graham 1969) of forward and backward part, on one lane that computes and one for each axis'
// transfers, with times of the cost model: of the ops that could run now the one with the longest way to the end of the
// part goes first, so what nothing waits for (gradients of weights) fills the waits; a transfer starts as soon as its
// operand is there and is waited for where it is first needed. Sums of gradients travel when the wire is free: nothing
// computes with them. No op is put off, or comes before its turn, by more than `window` of the part's compute time (a
// start by no more than four times what it takes), so that activations do not pile up. Order changes no bit: operands
// stay what they were. Options: window, cluster, profile.
#include <algorithm>
#include <set>

#include "ir/op_table.h"
#include "passes/cost_options.h"
#include "passes/passes.h"
#include "passes/phase_editor.h"

namespace interlace {
namespace {

constexpr int64_t kAhead = 4;  // times of a transfer that it may start before its turn

struct Node {
  OpId op = kNone;
  std::vector<int32_t> before, after;  // nodes
  int32_t waits = 0;                   // of `before`, how many have not run
  int64_t compute_ps = 0, transfer_ps = 0;
  int64_t to_end_ps = 0;  // longest way to the end of the part, itself included
  int64_t turn_ps = 0;    // compute time of what stood before it
  int64_t ready_ps = 0;   // when what it needs is there
  int32_t start = kNone;  // of a wait: its start
  bool done = false;
  bool gradient = false;  // a start that only gradients come from
};

class Scheduler {
 public:
  Scheduler(Program& program, CostModel& model, double window) : program_(program), model_(model), window_(window) {}

  // A stretch of ops, in a better order.
  Result<std::vector<OpId>> Order(const std::vector<OpId>& ops) {
    nodes_.clear();
    INTERLACE_TRY(Read(ops));
    for (size_t i = nodes_.size(); i-- > 0;) {
      int64_t longest = 0;
      for (int32_t next : nodes_[i].after) longest = std::max(longest, nodes_[next].to_end_ps);
      nodes_[i].to_end_ps = longest + nodes_[i].compute_ps + nodes_[i].transfer_ps;
      nodes_[i].gradient = IsOfGradients(nodes_[i]);
    }
    return Run();
  }

 private:
  Status Read(const std::vector<OpId>& ops) {
    const auto roots = static_cast<size_t>(program_.num_values());
    std::vector<int32_t> writer(roots, kNone);         // by root: who wrote it last
    std::vector<std::vector<int32_t>> readers(roots);  // since then
    std::vector<int32_t> start_of(roots, kNone);       // by root: the start whose result it is
    int32_t python = kNone;
    int64_t turn = 0;
    for (OpId id : ops) {
      const auto at = static_cast<int32_t>(nodes_.size());
      nodes_.emplace_back();
      Node& node = nodes_.back();
      const Op& op = program_.op(id);
      node.op = id;
      if (!TakesNoTime(op)) {
        INTERLACE_ASSIGN(const OpCost cost, model_.Cost(op));
        (IsStart(op) ? node.transfer_ps : node.compute_ps) = TimeOf(cost);
      }
      node.turn_ps = turn;
      turn += node.compute_ps;
      std::vector<int32_t> before;
      auto reads = [&](ValueId v) {
        const ValueId root = program_.RootOf(v);
        if (writer[root] != kNone) before.push_back(writer[root]);
        readers[root].push_back(at);
      };
      auto writes = [&](ValueId v) {
        const ValueId root = program_.RootOf(v);
        if (writer[root] != kNone) before.push_back(writer[root]);
        before.insert(before.end(), readers[root].begin(), readers[root].end());
        readers[root].clear();
        writer[root] = at;
      };
      ForEachOperand(op, reads);
      for (ValueId v : WrittenOperands(program_, op)) writes(v);
      if (IsWait(op)) {
        for (const Arg& arg : op.args) {
          const ValueId root = program_.RootOf(arg.value);
          node.start = std::max(node.start, start_of[root]);
          writes(arg.value);  // from here its readers may run
        }
        if (node.start != kNone) {  // and its operands may be written
          ForEachOperand(program_.op(nodes_[node.start].op),
                         [&](ValueId v) { readers[program_.RootOf(v)].push_back(at); });
        }
      }
      for (ValueId result : op.results) {
        if (result == kNone) continue;
        if (IsStart(op)) start_of[program_.RootOf(result)] = at;
        if (program_.RootOf(result) == result || program_.value(result).placed) writes(result);
        // Whoever reads a view comes after it, too.
        if (program_.RootOf(result) != result) view_of_.resize(roots, kNone), view_of_[result] = at;
      }
      ForEachOperand(op, [&](ValueId v) {
        if (static_cast<size_t>(v) < view_of_.size() && view_of_[v] != kNone && view_of_[v] != at)
          before.push_back(view_of_[v]);
      });
      if (op.kind == OpKind::kCallPython) {
        if (python != kNone) before.push_back(python);
        python = at;
      }
      std::sort(before.begin(), before.end());
      before.erase(std::unique(before.begin(), before.end()), before.end());
      before.erase(std::remove(before.begin(), before.end(), at), before.end());
      node.before = std::move(before);
      node.waits = static_cast<int32_t>(node.before.size());
      for (int32_t from : node.before) nodes_[from].after.push_back(at);
    }
    view_of_.clear();
    total_ps_ = turn;
    return Ok{};
  }

  // A transfer or view of which nothing but gradients is made.
  bool IsOfGradients(const Node& node) const {
    const Op& op = std::as_const(program_).op(node.op);
    if (op.kind == OpKind::kGrad) return true;
    if (!IsStart(op) && !IsWait(op) && op.kind != OpKind::kView) return false;
    return !node.after.empty() &&
           std::all_of(node.after.begin(), node.after.end(), [&](int32_t next) { return nodes_[next].gradient; });
  }

  static int64_t TimeOf(const OpCost& cost) { return cost.latency_ps + cost.work_ps + cost.finish_ps; }

  // A wait runs when somebody needs it: it is ready once its start has run, at the time of arrival.
  std::vector<OpId> Run() {
    const auto longest_first = [&](int32_t a, int32_t b) {
      return nodes_[a].to_end_ps != nodes_[b].to_end_ps ? nodes_[a].to_end_ps > nodes_[b].to_end_ps : a < b;
    };
    const auto soonest_first = [&](int32_t a, int32_t b) {
      return nodes_[a].ready_ps != nodes_[b].ready_ps ? nodes_[a].ready_ps < nodes_[b].ready_ps : longest_first(a, b);
    };
    std::set<int32_t, decltype(longest_first)> free(longest_first);    // what takes no time
    std::set<int32_t, decltype(soonest_first)> coming(soonest_first);  // compute whose operands are under way
    std::set<int32_t, decltype(longest_first)> here(longest_first);    // compute whose operands are there
    std::set<int32_t> far;                                             // compute whose turn is too far away
    std::set<std::pair<int64_t, int32_t>> early;  // starts, by the compute time that must have passed
    std::set<std::pair<int64_t, int32_t>> late;   // gradients that travel, by their arrival
    std::set<int32_t> sums;                       // of gradients, when nothing else is on the wire
    const auto window = static_cast<int64_t>(window_ * static_cast<double>(total_ps_));
    int64_t now = 0, wire = 0, computed = 0;
    size_t oldest = 0;  // compute that has not run
    const auto turn = [&] { return oldest < nodes_.size() ? nodes_[oldest].turn_ps : total_ps_; };
    const auto add = [&](int32_t at) {
      const Node& node = nodes_[at];
      const int64_t from = node.turn_ps - std::min(window, kAhead * node.transfer_ps);
      if (node.compute_ps > 0) {
        if (node.turn_ps <= turn() + window) {
          coming.insert(at);
        } else {
          far.insert(at);
        }
      } else if (IsStart(program_.op(node.op)) && !node.gradient && from > computed) {
        early.emplace(from, at);
      } else {
        free.insert(at);
      }
    };
    const auto finish = [&](int32_t at, int64_t when) {
      nodes_[at].done = true;
      for (int32_t next : nodes_[at].after) {
        Node& node = nodes_[next];
        node.ready_ps = std::max(node.ready_ps, when);
        if (--node.waits == 0) add(next);
      }
    };
    std::vector<OpId> out;
    out.reserve(nodes_.size());
    // Ops that take no time: starts at once; waits and views are put in front of who needs them (Emit).
    const auto drain = [&] {
      while (!free.empty()) {
        const int32_t at = free.extract(free.begin()).value();
        const Node& node = nodes_[at];
        const Op& op = program_.op(node.op);
        int64_t when = node.ready_ps;
        if (op.kind == OpKind::kGrad && when > now) {
          late.emplace(when, at);
          continue;
        }
        if (IsStart(op) && node.gradient && wire > now) {
          sums.insert(at);
          continue;
        }
        if (IsStart(op)) {
          wire = std::max({wire, now, when}) + node.transfer_ps;
          arrival_[at] = wire;
        } else if (node.start != kNone) {
          when = std::max(when, arrival_[node.start]);
        }
        if (NeededLater(op)) {
          pending_[at] = 1;
        } else {
          Emit(at, out);
        }
        finish(at, when);
      }
    };
    arrival_.assign(nodes_.size(), 0);
    pending_.assign(nodes_.size(), 0);
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (nodes_[i].waits == 0) add(static_cast<int32_t>(i));
    }
    drain();
    while (!coming.empty() || !here.empty() || !far.empty() || !early.empty() || !late.empty() || !sums.empty()) {
      while (oldest < nodes_.size() && (nodes_[oldest].done || nodes_[oldest].compute_ps == 0)) ++oldest;
      while (!far.empty() && nodes_[*far.begin()].turn_ps <= turn() + window)
        coming.insert(far.extract(far.begin()).value());
      if (coming.empty() && here.empty()) {  // the oldest needs what is held back
        if (!early.empty()) {
          free.insert(early.extract(early.begin()).value().second);
          drain();
        } else if (!far.empty()) {
          coming.insert(far.extract(far.begin()).value());
        } else if (!sums.empty()) {
          now = std::max(now, wire);
          free.insert(sums.extract(sums.begin()).value());
          drain();
        } else {
          now = std::max(now, late.begin()->first);
          free.insert(late.extract(late.begin()).value().second);
          drain();
        }
        continue;
      }
      while (!coming.empty() && nodes_[*coming.begin()].ready_ps <= now)
        here.insert(coming.extract(coming.begin()).value());
      const int32_t at = here.empty() ? coming.extract(coming.begin()).value() : here.extract(here.begin()).value();
      now = std::max(now, nodes_[at].ready_ps) + nodes_[at].compute_ps;
      computed += nodes_[at].compute_ps;
      Emit(at, out);
      finish(at, now);
      while (!early.empty() && early.begin()->first <= computed)
        free.insert(early.extract(early.begin()).value().second);
      while (!late.empty() && late.begin()->first <= now) free.insert(late.extract(late.begin()).value().second);
      drain();
      if (!sums.empty() && wire <= now) {
        free.insert(sums.extract(sums.begin()).value());
        drain();
      }
    }
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (pending_[i]) Emit(static_cast<int32_t>(i), out);
    }
    return out;
  }

  static bool NeededLater(const Op& op) { return IsWait(op) || op.kind == OpKind::kView; }

  // The op, behind the waits and views it needs.
  void Emit(int32_t at, std::vector<OpId>& out) {
    for (int32_t before : nodes_[at].before) {
      if (pending_[before]) Emit(before, out);
    }
    pending_[at] = 0;
    out.push_back(nodes_[at].op);
  }

  Program& program_;
  CostModel& model_;
  double window_;
  std::vector<Node> nodes_;
  std::vector<int32_t> view_of_;  // by value: the node of the view
  std::vector<int64_t> arrival_;  // by node: of a start's data
  std::vector<char> pending_;     // by node: done, and not yet written down
  int64_t total_ps_ = 0;
};

}  // namespace

Result<bool> Overlap(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(const double window, options.Number("window", 0.125));
  Phase* phase = program.MicroBatchPhase();
  if (phase == nullptr) return MakeError("the program has no single micro-batch phase");
  INTERLACE_ASSIGN(const PassCosts costs, ReadCosts(program, options));
  INTERLACE_ASSIGN(CostModel model, costs.Model(program));
  Scheduler scheduler(program, model, window);
  std::vector<OpId> ordered;
  for (size_t at = 0; at < phase->ops.size();) {
    const Part part = program.op(phase->ops[at]).part;
    std::vector<OpId> stretch;
    while (at < phase->ops.size() && program.op(phase->ops[at]).part == part) stretch.push_back(phase->ops[at++]);
    INTERLACE_ASSIGN(const std::vector<OpId> better, scheduler.Order(stretch));
    ordered.insert(ordered.end(), better.begin(), better.end());
  }
  const bool changed = ordered != phase->ops;
  phase->ops = std::move(ordered);
  return changed;
}

}  // namespace interlace
