#include "passes/tensor/fold.h"

#include <algorithm>
#include <map>

#include "ir/text.h"

namespace interlace::tensor {
namespace {

constexpr size_t kKept = 4;  // the first, the middle one, and the last two

struct Block {
  std::string path, list;
  std::vector<OpId> forward, backward;
  std::string signature;
};

std::string_view PathOf(const Program& program, const Op& op) {
  if (op.kind == OpKind::kGrad) {
    const Param* param = program.ParamOf(op.args[0].value);
    return param == nullptr ? std::string_view() : std::string_view(param->name);
  }
  return op.module == kNone ? std::string_view() : std::string_view(program.modules[op.module].path);
}

void Append(const Program& program, const Op& op, std::string& out) {
  out += op.name;
  for (ValueId id : op.results) {
    out += id == kNone ? "_" : std::to_string(static_cast<int>(program.value(id).type.dtype));
    if (id == kNone) continue;
    for (const auto* dims : {&program.value(id).type.sizes, &program.value(id).type.strides}) {
      for (const Dim& dim : *dims) out += "," + (dim.is_const() ? std::to_string(dim.value) : "?");
      out += ";";
    }
  }
  out += "\n";
}

std::vector<Block> BlocksIn(const Program& program, const Phase& phase) {
  std::vector<Block> blocks;
  std::map<std::string, size_t, std::less<>> index;
  for (OpId id : phase.ops) {
    const Op& op = program.op(id);
    const std::string_view path = BlockOfPath(PathOf(program, op));
    if (path.empty()) continue;
    auto it = index.find(path);
    if (it == index.end()) {
      it = index.emplace(std::string(path), blocks.size()).first;
      blocks.push_back({std::string(path), std::string(path.substr(0, path.rfind('.') + 1)), {}, {}, {}});
    }
    (op.part == Part::kBackward ? blocks[it->second].backward : blocks[it->second].forward).push_back(id);
  }
  for (Block& block : blocks) {
    for (OpId id : block.forward) Append(program, program.op(id), block.signature);
    block.signature += "backward\n";
    for (OpId id : block.backward) Append(program, program.op(id), block.signature);
  }
  return blocks;
}

}  // namespace

std::string_view BlockOfPath(std::string_view path) {
  for (size_t at = 0; at < path.size();) {
    const size_t end = std::min(path.find('.', at), path.size());
    const std::string_view part = path.substr(at, end - at);
    if (part.find_first_not_of("0123456789") == std::string_view::npos) return path.substr(0, end);
    at = end + 1;
  }
  return {};
}

Folded Fold(const Program& whole) {
  Folded out{whole.Clone(), std::vector<double>(whole.modules.size(), 1.0)};
  Program& program = out.program;
  Phase& phase = *program.MicroBatchPhase();
  const std::vector<Block> blocks = BlocksIn(program, phase);
  std::vector<ValueId> twin(static_cast<size_t>(program.num_values()), kNone);
  std::vector<bool> gone(static_cast<size_t>(program.num_ops()), false);
  auto replace = [&](const std::vector<OpId>& ops, const std::vector<OpId>& by) {
    for (size_t i = 0; i < ops.size(); ++i) {
      gone[ops[i]] = true;
      const std::vector<ValueId>&from = program.op(ops[i]).results, &to = program.op(by[i]).results;
      for (size_t r = 0; r < from.size(); ++r) {
        if (from[r] != kNone) twin[from[r]] = to[r];
      }
    }
  };
  for (size_t begin = 0, end = 0; begin < blocks.size(); begin = end) {
    for (end = begin + 1; end < blocks.size(); ++end) {
      if (blocks[end].list != blocks[begin].list || blocks[end].signature != blocks[begin].signature) break;
    }
    if (end - begin <= kKept) continue;
    const Block &middle = blocks[begin + 1], &behind = blocks[end - 2];
    for (size_t i = begin + 2; i + 2 < end; ++i) {
      replace(blocks[i].forward, middle.forward);
      replace(blocks[i].backward, behind.backward);
    }
    for (const Module& module : program.modules) {
      if (BlockOfPath(module.path) == middle.path) out.times[module.id] = static_cast<double>(end - begin - 3);
    }
  }
  auto twin_of = [&](ValueId id) { return id != kNone && twin[id] != kNone ? twin[id] : id; };
  std::erase_if(phase.ops, [&](OpId id) { return gone[id]; });
  std::vector<bool> used(twin.size(), false);
  for (OpId id : phase.ops) {
    Op& op = program.op(id);
    ForEachOperand(op, [&](ValueId& operand) {
      operand = twin_of(operand);
      used[program.RootOf(operand)] = true;
    });
    for (ValueId& written : op.writes) written = twin_of(written);
    for (ValueId result : op.results) {
      if (result != kNone) program.value(result).root = twin_of(program.RootOf(result));
    }
  }
  std::erase_if(program.params, [&](const Param& param) { return !used[param.value]; });
  program.Compact();
  return out;
}

}  // namespace interlace::tensor
