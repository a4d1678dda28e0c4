#include "sim/critical_path.h"

#include <algorithm>
#include <map>

#include "base/sort.h"
#include "ir/op_table.h"

namespace interlace {
namespace {

// Walks from the end of the step to its start. Where it stands: a rank's compute lane just before an instance, or a
// transfer.
class Tracer {
 public:
  Tracer(const EngineInput& in, const EngineOutput& out) : in_(in), out_(out) {}

  std::vector<PathPiece> Run() {
    int32_t rank = 0, transfer = -1;
    int64_t last = -1;
    for (size_t r = 0; r < out_.ranks.size(); ++r) {
      int64_t end = out_.ranks[r].end_ps.empty() ? 0 : out_.ranks[r].end_ps.back();
      if (end > last) last = end, rank = static_cast<int32_t>(r);
    }
    if (last < out_.makespan_ps) {  // a transfer outlives all compute
      for (size_t t = 0; t < out_.transfers.size() && transfer < 0; ++t) {
        if (out_.transfers[t].end_ps == out_.makespan_ps) transfer = static_cast<int32_t>(t);
      }
    }
    int64_t instance = static_cast<int64_t>(out_.ranks[rank].end_ps.size()) - 1;
    while (transfer >= 0 || instance >= 0) {
      if (transfer >= 0) {
        const TransferRecord& t = out_.transfers[transfer];
        rank = t.cause_rank;
        const bool same = in_.programs[rank] == in_.programs[t.rank];  // ops have the same numbers there
        Push(PathPiece::Kind::kTransfer, same ? rank : t.rank, t.op->op, t.op->lane, t.start_ps, t.end_ps, Alone(t));
        transfer = t.cause_transfer;
        instance = t.cause_instance;  // takes no time itself, but may have been launched late
        if (transfer < 0) Launch(rank, instance--);
      } else {
        transfer = Compute(rank, instance);
        --instance;
      }
    }
    std::reverse(pieces_.begin(), pieces_.end());
    return std::move(pieces_);
  }

 private:
  // The instance on the compute lane and the gap before it. Returns the transfer that it waited for, or -1.
  int32_t Compute(int32_t rank, int64_t instance) {
    const RankRecord& r = out_.ranks[rank];
    size_t run = 0;
    const LoweredOp& op = in_.programs[rank]->At(instance, run);
    int64_t start = r.start_ps[instance], end = r.end_ps[instance];
    if (op.kind == LoweredOp::Kind::kWait) {
      int32_t transfer = r.waited_for[instance];
      int64_t came = transfer >= 0 ? out_.transfers[transfer].end_ps : start;
      Push(PathPiece::Kind::kCompute, rank, op.op, Lane::kCompute, came, end, end - came);  // adding up what came
      if (transfer >= 0 && came > start) return transfer;
    } else if (op.kind == LoweredOp::Kind::kStart) {
      Push(PathPiece::Kind::kCompute, rank, op.op, Lane::kCompute, start, end, end - start);
    } else if (end > start) {
      Push(PathPiece::Kind::kCompute, rank, op.op, Lane::kCompute, start, end, op.work_ps);
    }
    Launch(rank, instance);
    return -1;
  }

  // The gap before an instance.
  void Launch(int32_t rank, int64_t instance) {
    const RankRecord& r = out_.ranks[rank];
    int64_t before = instance == 0 ? 0 : r.end_ps[instance - 1], start = r.start_ps[instance];
    size_t run = 0;
    OpId op = in_.programs[rank]->At(instance, run).op;
    if (before < start) Push(PathPiece::Kind::kLaunch, rank, op, Lane::kCompute, before, start, start - before);
  }

  int64_t Alone(const TransferRecord& t) const {
    const OpCost& cost = in_.programs[t.rank]->costs[t.op->cost];
    return cost.latency_ps + cost.work_ps;
  }

  void Push(PathPiece::Kind kind, int32_t rank, OpId op, Lane lane, int64_t start, int64_t end, int64_t alone) {
    if (end <= start) return;
    pieces_.push_back({kind, rank, op, lane, start, end, std::max<int64_t>(end - start - alone, 0)});
  }

  const EngineInput& in_;
  const EngineOutput& out_;
  std::vector<PathPiece> pieces_;
};

std::string_view PartName(Part part) {
  static constexpr std::string_view kNames[] = {"", " fwd", " bwd", " upd"};
  return kNames[static_cast<int>(part)];
}

}  // namespace

std::string ModuleOf(const Program& program, const Op& op) {
  if (op.module >= 0 && op.module < static_cast<int32_t>(program.modules.size()))
    return program.modules[op.module].path;
  if (op.units.empty()) return "";
  for (const Param& param : program.params) {
    if (param.unit != op.units[0]) continue;
    size_t dot = param.name.rfind('.');
    return dot == std::string::npos ? "" : param.name.substr(0, dot);
  }
  return "";
}

std::vector<PathPiece> CriticalPath(const EngineInput& input, const EngineOutput& output) {
  return Tracer(input, output).Run();
}

std::vector<Blame> BlameModules(const EngineInput& input, const std::vector<PathPiece>& path) {
  // By op first: names are made once for each.
  std::map<std::pair<const Program*, OpId>, std::pair<std::string, std::string>> names;
  std::map<std::pair<std::string, std::string>, Blame> sums;
  for (const PathPiece& piece : path) {
    const Program& program = *input.programs[piece.rank]->program;
    auto [name, fresh] = names.try_emplace({&program, piece.op});
    const Op& op = program.op(piece.op);
    if (fresh) {
      name->second.first = ModuleOf(program, op);
      name->second.second = std::string(LaneName(piece.lane));
      if (piece.lane == Lane::kCompute) name->second.second += PartName(op.part);
    }
    std::pair<std::string, std::string> key = name->second;
    if (piece.kind == PathPiece::Kind::kLaunch) key.second = "launch";
    Blame& blame = sums[key];
    blame.module = key.first;
    blame.lane = key.second;
    blame.time_ps += piece.end_ps - piece.start_ps;
    blame.slowed_ps += piece.slowed_ps;
  }
  std::vector<Blame> out;
  for (auto& [key, blame] : sums) out.push_back(std::move(blame));
  StableSort(out, [](const Blame& a, const Blame& b) { return a.time_ps > b.time_ps; });
  return out;
}

}  // namespace interlace
