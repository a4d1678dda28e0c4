#include "passes/tensor/roles.h"

#include <algorithm>
#include <map>
#include <set>

#include "passes/tensor/fold.h"
#include "passes/tensor/placement.h"
#include "passes/tensor/rules.h"

namespace interlace::tensor {
namespace {

// "h.*.attn.c_attn.weight": numbers of blocks, those with a module and a parameter behind them.
std::string PatternOf(const std::string& name) {
  std::string out;
  for (size_t at = 0; at <= name.size();) {
    const size_t end = std::min(name.find('.', at), name.size());
    const std::string part = name.substr(at, end - at);
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == std::string::npos;
    const bool block = number && std::count(name.begin() + static_cast<ptrdiff_t>(end), name.end(), '.') >= 2;
    out += (out.empty() && at == 0 ? "" : ".") + (block ? "*" : part);
    at = end + 1;
  }
  return out;
}

class Reader {
 public:
  Reader(const Program& program, int64_t ranks)
      : program_(program), ranks_(ranks), layout_(LayoutOf(program, Constant)) {}

  std::vector<Role> Read() {
    Name();
    std::map<std::string, size_t> index;  // by pattern
    for (OpId id : program_.MicroBatchPhase()->ops) {
      const Op& op = program_.op(id);
      if (op.part == Part::kBackward) break;
      const std::vector<ValueId> operands = OperandValues(op);
      for (ValueId operand : operands) {
        const Param* param = ParamAt(operand);
        if (param == nullptr || geometry_[param->value].sizes.size() < 2) continue;
        if (index.emplace(names_[param->name], roles_.size()).second) Add(*param);
      }
      const Rule rule = RuleOf(op, [&](ValueId id) -> const Geometry& { return geometry_[id]; });
      Results(op, rule, operands);
      Biases(op, rule, operands, index);
    }
    for (Role& role : roles_) AddChoices(role);
    return std::move(roles_);
  }

 private:
  // The pattern of each parameter: its own name, unless all that have the pattern are alike.
  void Name() {
    std::map<std::string, std::vector<const Param*>> groups;
    for (const Param& param : program_.params) groups[PatternOf(param.name)].push_back(&param);
    for (const auto& group : groups) {  // no structured binding: the lambda below reads it
      const std::string& pattern = group.first;
      const std::vector<const Param*>& params = group.second;
      const bool alike = params.size() > 1 && std::all_of(params.begin(), params.end(), [&](const Param* p) {
                           return program_.value(p->value).type == program_.value(params[0]->value).type;
                         });
      for (const Param* param : params) {
        names_[param->name] = alike ? pattern : param->name;
        members_[names_[param->name]].push_back(param->name);
      }
    }
  }

  const Param* ParamAt(ValueId id) const {
    const ValueId root = program_.RootOf(id);
    return program_.value(root).kind == ValueKind::kParam ? program_.ParamOf(root) : nullptr;
  }

  int64_t BytesOf(const Param& param) const {
    return geometry_[param.value].numel() * DTypeBytes(geometry_[param.value].dtype);
  }

  void Add(const Param& param) {
    Role role{names_[param.name], members_[names_[param.name]], 0, 0, "", {}, {}, ""};
    const std::string_view block = BlockOfPath(param.name);
    role.list = role.pattern.find('*') == std::string::npos ? "" : block.substr(0, block.rfind('.') + 1);
    Count(role, role.names, BytesOf(param));
    weights_.push_back(&param);
    roles_.push_back(std::move(role));
  }

  void Count(Role& role, const std::vector<std::string>& names, int64_t bytes) const {
    role.bytes += bytes * static_cast<int64_t>(names.size());
    for (const Param& param : program_.params) {
      const bool trained = param.trainable && std::find(names.begin(), names.end(), param.name) != names.end();
      role.trained_bytes += trained ? bytes : 0;
    }
  }

  // The dimension of a parameter that a dimension of its view walks along.
  int32_t DimOfParam(const Param& param, ValueId view, size_t dim) const {
    const Geometry &own = geometry_[param.value], &seen = geometry_[view];
    for (size_t d = 0; d < own.sizes.size(); ++d) {
      if (own.strides[d] == seen.strides[dim] && own.sizes[d] == seen.sizes[dim]) return static_cast<int32_t>(d);
    }
    return -1;
  }

  // Of what products make: along which dimension of which weight the last dimension of the result walks.
  void Results(const Op& op, const Rule& rule, const std::vector<ValueId>& operands) {
    if (op.results.empty() || op.results[0] == kNone || rule.results[0].empty()) return;
    const int32_t factor = rule.results[0].back();
    for (size_t i = 0; i < operands.size(); ++i) {
      const Param* param = ParamAt(operands[i]);
      if (param == nullptr || geometry_[param->value].sizes.size() < 2 || factor == kWholeDim) continue;
      const std::vector<int32_t>& dims = rule.operands[i];
      const auto it = std::find(dims.begin(), dims.end(), factor);
      if (it == dims.end()) continue;
      const int32_t dim = DimOfParam(*param, operands[i], static_cast<size_t>(it - dims.begin()));
      if (dim >= 0) made_by_[op.results[0]] = {param, dim};
    }
  }

  // A parameter of one dimension beside a weight, or added to what a product made.
  void Biases(const Op& op, const Rule& rule, const std::vector<ValueId>& operands,
              const std::map<std::string, size_t>& index) {
    for (size_t i = 0; i < operands.size(); ++i) {
      const Param* bias = ParamAt(operands[i]);
      if (bias == nullptr || geometry_[bias->value].sizes.size() != 1 || followers_.count(bias->name) != 0) continue;
      if (rule.operands[i].empty() || rule.operands[i].back() == kWholeDim) continue;
      const int32_t factor = rule.operands[i].back();
      for (size_t k = 0; k < operands.size(); ++k) {
        const std::vector<int32_t>& dims = rule.operands[k];
        const auto it = std::find(dims.begin(), dims.end(), factor);
        if (k == i || it == dims.end()) continue;
        const Param* weight = ParamAt(operands[k]);
        int32_t dim = -1;
        if (weight != nullptr && geometry_[weight->value].sizes.size() >= 2) {
          dim = DimOfParam(*weight, operands[k], static_cast<size_t>(it - dims.begin()));
        } else if (auto made = made_by_.find(program_.RootOf(operands[k])); made != made_by_.end()) {
          const bool last =
              it + 1 == dims.end() && geometry_[operands[k]].sizes.back() == geometry_[made->first].sizes.back();
          if (last && BaseName(op.name) == "aten.add") weight = made->second.first, dim = made->second.second;
        }
        if (weight == nullptr || dim < 0 || geometry_[weight->value].sizes[dim] != geometry_[bias->value].numel())
          continue;
        followers_.insert(bias->name);
        Role& role = roles_[index.at(names_[weight->name])];
        const std::string& pattern = names_[bias->name];
        Count(role, {bias->name}, BytesOf(*bias));
        if (std::none_of(role.biases.begin(), role.biases.end(), [&](const Bias& b) { return b.pattern == pattern; }))
          role.biases.push_back({pattern, members_[pattern], dim});
        break;
      }
    }
  }

  void AddChoices(Role& role) {
    const Param& param = *weights_[static_cast<size_t>(&role - roles_.data())];
    const Geometry& geometry = geometry_[param.value];
    role.choices.push_back({});
    if (StaysWhole(program_, param)) return;
    const auto longest = std::max_element(geometry.sizes.begin(), geometry.sizes.end());
    if (*longest % ranks_ != 0)
      role.undivided = DoesNotDivide(role.pattern, longest - geometry.sizes.begin(), *longest, 1, ranks_);
    for (size_t d = 0; d < geometry.sizes.size(); ++d) {
      const auto dim = static_cast<int32_t>(d);
      bool one = true;  // a cut of it all goes through none of its parts
      for (int64_t blocks : {2, 3}) {
        const Parts parts = PartsOf(param, dim, blocks);
        if (parts == Parts::kNone || !PeriodOf(geometry, {dim, blocks}, ranks_)) continue;
        role.choices.push_back({dim, blocks});
        one = one && parts == Parts::kSteps && blocks % ranks_ == 0;
      }
      if (one && PeriodOf(geometry, {dim, 1}, ranks_)) role.choices.push_back({dim, 1});
    }
  }

  // Whether the product's result is taken as so many equal parts: by views that begin at one, or as a dimension that
  // steps from one to the next, as heads are, too: those ranks that divide them may have whole.
  enum class Parts { kNone, kSteps, kApart };
  Parts PartsOf(const Param& param, int32_t dim, int64_t blocks) const {
    Parts found = Parts::kNone;
    for (const auto& [result, made] : made_by_) {
      if (made.first != &param || made.second != dim) continue;
      const int64_t size = geometry_[result].sizes.back();
      if (size % blocks != 0) continue;
      for (ValueId view : layout_.views[result]) {
        const Geometry& g = geometry_[view];
        if (g.offset % size != 0 && g.offset % (size / blocks) == 0 && Extent(g, size) <= size / blocks)
          return Parts::kApart;
        for (size_t d = 0; d < g.sizes.size(); ++d) {
          if (g.sizes[d] == blocks && g.strides[d] == size / blocks) found = Parts::kSteps;
        }
      }
    }
    return found;
  }

  // Elements that a view spans within a row.
  static int64_t Extent(const Geometry& g, int64_t row) {
    int64_t extent = 1;
    for (size_t d = 0; d < g.sizes.size(); ++d) {
      if (g.strides[d] < row) extent += (g.sizes[d] - 1) * g.strides[d];
    }
    return extent;
  }

  const Program& program_;
  int64_t ranks_;
  const Layout layout_;
  const std::vector<Geometry>& geometry_ = layout_.geometry;
  std::map<std::string, std::string> names_;                     // parameter → pattern
  std::map<std::string, std::vector<std::string>> members_;      // pattern → parameters
  std::map<ValueId, std::pair<const Param*, int32_t>> made_by_;  // result of a product → weight, dimension
  std::set<std::string> followers_;
  std::vector<const Param*> weights_;  // by role: the first
  std::vector<Role> roles_;
};

}  // namespace

std::vector<Role> RolesOf(const Program& program, int64_t ranks) {
  return Reader(program, ranks).Read();
}

std::vector<PlanEntry> PlanOf(const std::vector<Role>& roles, const Choices& choices) {
  std::vector<PlanEntry> plan;
  for (size_t i = 0; i < roles.size(); ++i) {
    const Held& held = roles[i].choices[static_cast<size_t>(choices[i])];
    if (held.dim < 0) continue;
    plan.push_back({roles[i].pattern, held.dim, held.blocks});
    for (const Bias& bias : roles[i].biases) {
      if (bias.dim == held.dim) plan.push_back({bias.pattern, 0, held.blocks});
    }
  }
  return plan;
}

Status CheckBlocks(const std::vector<Role>& roles, const std::vector<PlanEntry>& plan) {
  for (const PlanEntry& entry : plan) {
    if (entry.blocks != 1) continue;
    for (const Role& role : roles) {
      const bool named = std::any_of(role.names.begin(), role.names.end(),
                                     [&](const std::string& name) { return Matches(entry.pattern, name); });
      const Held asked{static_cast<int32_t>(entry.dim), 1};
      if (!named || std::find(role.choices.begin(), role.choices.end(), asked) != role.choices.end()) continue;
      for (const Held& held : role.choices) {
        if (held.dim != entry.dim) continue;
        return MakeError("what '", entry.pattern, "' makes is taken in ", held.blocks,
                         " parts, and a cut along dimension ", entry.dim,
                         " goes through them: of several weights in one, write '", entry.pattern, " ", PrintHeld(held),
                         "', which cuts each; of heads, fewer than ranks, write nothing: they stay whole");
      }
    }
  }
  return Ok{};
}

std::string PrintHeld(const Held& held) {
  if (held.dim < 0) return "whole";
  return std::to_string(held.dim) + (held.blocks == 1 ? "" : " blocks " + std::to_string(held.blocks));
}

}  // namespace interlace::tensor
