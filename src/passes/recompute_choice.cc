#include "passes/recompute_choice.h"

#include <algorithm>
#include <utility>

#include "base/scan.h"
#include "base/suggest.h"
#include "ir/op_table.h"

namespace interlace {
namespace {

bool IsWithin(std::string_view path, std::string_view outer) {
  return path.starts_with(outer) && (path.size() == outer.size() || outer.empty() || path[outer.size()] == '.');
}

}  // namespace

std::string BlockOf(std::string_view path) {
  size_t end = 0;
  for (std::string_view part : Split(path, '.')) {
    end += part.size();
    if (!part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos)
      return std::string(path.substr(0, end));
    ++end;
  }
  return {};
}

RecomputeChoice::RecomputeChoice(const Program& program, const Phase& phase)
    : program_(program),
      phase_(phase),
      facts_(program, phase),
      first_backward_(static_cast<int32_t>(phase.ops.size())),
      droppable_(program.num_values(), 0),
      dropped_(program.num_values(), 0),
      again_(phase.ops.size(), 0) {
  // Otherwise a draw's numbers come from its key, and so are the same when it runs again.
  const std::string* rng = program.Meta("rng");
  draws_in_order_ = rng != nullptr && *rng == "compat";
  for (size_t i = 0; i < phase.ops.size(); ++i) {
    if (program.op(phase.ops[i]).part != Part::kBackward) continue;
    first_backward_ = std::min(first_backward_, static_cast<int32_t>(i));
    last_backward_ = static_cast<int32_t>(i);
  }
}

Status RecomputeChoice::FindBlocks(const std::vector<std::string>& paths) {
  std::vector<std::string> blocks = paths;
  block_of_module_.assign(program_.modules.size(), -1);
  if (paths.empty()) {
    for (const Module& module : program_.modules) {
      std::string element = BlockOf(module.path);
      if (element.empty()) continue;
      auto found = std::find(blocks.rbegin(), blocks.rend(), element);  // modules of one block are neighbours
      if (found == blocks.rend()) found = (blocks.push_back(element), blocks.rbegin());
      block_of_module_[module.id] = static_cast<int32_t>(blocks.rend() - found) - 1;
    }
    if (blocks.empty()) {
      return MakeError(
          "the model has no list of modules whose elements could be blocks; name them: blocks=encoder+decoder");
    }
  } else {
    std::vector<std::string_view> known;
    for (const Module& module : program_.modules) known.push_back(module.path);
    for (size_t i = 0; i < blocks.size(); ++i) {
      for (size_t j = 0; j < blocks.size(); ++j) {
        if (i != j && IsWithin(blocks[i], blocks[j])) {
          return MakeError("option blocks: '", blocks[i], "' lies within '", blocks[j], "'; blocks must not overlap");
        }
      }
      if (std::find(known.begin(), known.end(), blocks[i]) == known.end()) {
        return MakeError("option blocks: no module '", blocks[i], "'", DidYouMean(blocks[i], known));
      }
      for (const Module& module : program_.modules) {
        if (IsWithin(module.path, blocks[i])) block_of_module_[module.id] = static_cast<int32_t>(i);
      }
    }
  }
  blocks_ = std::move(blocks);
  FindDroppable();
  return Ok{};
}

// Whether the op gives the same bits when it runs again in the backward part, and nobody notices.
bool RecomputeChoice::MayRepeat(int32_t index) const {
  const Op& op = At(index);
  bool known =
      op.name.starts_with("aten.") || op.kind == OpKind::kView || op.kind == OpKind::kCopy || op.kind == OpKind::kCall;
  if (!known || op.part != Part::kForward || (op.rng && draws_in_order_) || HasEffect(program_, op)) return false;
  if (IsPureView(program_, op)) return true;
  bool same = true;
  ForEachOperand(op, [&](ValueId id) {
    const std::vector<int32_t>& writes = facts_.writes[program_.RootOf(id)];
    auto next = std::upper_bound(writes.begin(), writes.end(), index);
    same = same && (next == writes.end() || *next > last_backward_);
  });
  return same;
}

void RecomputeChoice::FindDroppable() {
  auto block_of = [&](int32_t index) {
    int32_t module = At(index).module;
    return module == kNone ? -1 : block_of_module_[module];
  };
  for (int32_t i = 0; i < first_backward_; ++i) {
    int32_t block = block_of(i);
    // A cast that moves onto the shard is gathered again as its parameter is.
    if (block < 0 || !MayRepeat(i) || At(i).Attr("on_shard") != nullptr) continue;
    for (ValueId id : At(i).results) {
      if (id == kNone || program_.RootOf(id) != id || facts_.leaves[id] || !facts_.writes[id].empty()) continue;
      bool stays = true;
      for (int32_t use : facts_.uses[id]) {
        // Forward ops of other blocks read it: it enters them. Some follow the backward part (new running statistics).
        if (At(use).part == Part::kBackward) continue;
        stays = stays && use < first_backward_ && block_of(use) == block;
        // A view that an op makes besides something else would have to run again wherever it is read.
        stays = stays &&
                (MayRepeat(use) || std::none_of(At(use).results.begin(), At(use).results.end(),
                                                [&](ValueId r) { return r != kNone && program_.RootOf(r) == id; }));
      }
      droppable_[id] = stays;
    }
  }
}

void RecomputeChoice::DropAll() {
  dropped_ = droppable_;
}

Status RecomputeChoice::DropBlocks(const std::vector<std::string>& paths) {
  std::vector<char> wanted(blocks_.size(), 0);
  for (const std::string& path : paths) {
    auto found = std::find(blocks_.begin(), blocks_.end(), path);
    if (found == blocks_.end()) {
      std::vector<std::string_view> known(blocks_.begin(), blocks_.end());
      return MakeError("option whole: no block '", path, "'", DidYouMean(path, known));
    }
    wanted[found - blocks_.begin()] = 1;
  }
  for (ValueId id = 0; id < static_cast<ValueId>(droppable_.size()); ++id) {
    if (droppable_[id] && wanted[block_of_module_[At(facts_.def[id]).module]]) dropped_[id] = 1;
  }
  return Ok{};
}

Status RecomputeChoice::DropAllBut(const std::vector<std::string>& saved_ops, bool asked, std::string_view keep) {
  for (const std::string& saved : saved_ops) {
    if (!asked) break;
    std::vector<std::string_view> known;
    for (int32_t i = 0; i < first_backward_; ++i) known.push_back(At(i).name);
    if (std::any_of(known.begin(), known.end(), [&](std::string_view name) { return IsWithin(name, saved); })) continue;
    return MakeError("option save: the forward part has no op '", saved, "'", DidYouMean(saved, known));
  }
  std::vector<int32_t> products(blocks_.size(), 0);
  for (ValueId id = 0; id < static_cast<ValueId>(droppable_.size()); ++id) {
    if (!droppable_[id]) continue;
    const Op& op = At(facts_.def[id]);
    if (keep == "all") {
      dropped_[id] = MakesScores(op) || ChangesScores(op, id);
      continue;
    }
    const bool second = keep == "second" && (IsWithin(op.name, "aten.mm") || IsWithin(op.name, "aten.addmm")) &&
                        ++products[block_of_module_[op.module]] % 2 == 0;
    dropped_[id] =
        second || (!asked && MakesScores(op)) ||
        std::none_of(saved_ops.begin(), saved_ops.end(), [&](auto& saved) { return IsWithin(op.name, saved); });
  }
  return Ok{};
}

// Makes scores of scores that are dropped: scales, masks, softmax, dropout.
bool RecomputeChoice::ChangesScores(const Op& op, ValueId result) const {
  const std::vector<Dim>& made = program_.value(result).type.sizes;
  bool found = false;
  ForEachOperand(op, [&](ValueId id) {
    const std::vector<Dim>& read = program_.value(id).type.sizes;
    const size_t n = read.size(), m = made.size();
    found = found || (dropped_[program_.RootOf(id)] && n > 1 && m > 1 && made[m - 1] == read[n - 1] &&
                      made[m - 2] == read[n - 2]);
  });
  return found;
}

// Attention's scores, where no kernel keeps them to itself: a batch of products (b, m, k) x (b, k, n) along a head's few
// dimensions, shorter than queries and keys are many. Much memory for little time: Korthikanti et al. "Reducing
// Activation Recomputation in Large Transformer Models", section 5. Sizes that are symbols count as long.
bool RecomputeChoice::MakesScores(const Op& op) const {
  constexpr int64_t kLargestHead = 256;
  if (op.name != "aten.bmm" && !op.name.starts_with("aten.baddbmm")) return false;
  const std::vector<Dim>& result = program_.value(op.results[0]).type.sizes;
  const Dim along = program_.value(op.args.back().value).type.sizes[1];
  auto shorter_than = [&](Dim size) { return !size.is_const() || along.value < size.value; };
  return along.is_const() && along.value <= kLargestHead && shorter_than(result[1]) && shorter_than(result[2]);
}

void RecomputeChoice::Close(int32_t index, const std::vector<char>& dropped, std::vector<char>& again,
                            std::vector<int32_t>& ops, std::vector<ValueId>& saved) const {
  std::vector<int32_t> work = {index};
  while (!work.empty()) {
    const Op& op = At(work.back());
    work.pop_back();
    ForEachOperand(op, [&](ValueId id) {
      ValueId root = program_.RootOf(id);
      if (facts_.def[root] < 0 || facts_.def[root] >= first_backward_) return;
      if (At(facts_.def[root]).Attr("on_shard") != nullptr) return;
      if (!dropped[root]) return saved.push_back(root);
      int32_t def = facts_.def[id];
      if (def >= first_backward_ || again[def]) return;
      again[def] = 1;
      ops.push_back(def);
      work.push_back(def);
    });
  }
}

RecomputeChoice::Kept RecomputeChoice::KeptWith(const std::vector<char>& dropped) const {
  Kept out{std::vector<char>(phase_.ops.size(), 0), std::vector<char>(dropped.size(), 0), {}};
  std::vector<int32_t> ops;
  std::vector<ValueId> reads;
  for (int32_t i = first_backward_; i <= last_backward_; ++i) {
    if (At(i).part == Part::kBackward) Close(i, dropped, out.again, ops, reads);
  }
  for (ValueId root : reads) {
    if (!out.saved[root]) out.roots.push_back(root);
    out.saved[root] = 1;
  }
  return out;
}

std::vector<int32_t> RecomputeChoice::Needed(int32_t index) {
  std::vector<int32_t> ops;
  std::vector<ValueId> saved;
  if (At(index).part == Part::kBackward) Close(index, dropped_, again_, ops, saved);
  std::sort(ops.begin(), ops.end());
  return ops;
}

std::optional<int64_t> RecomputeChoice::SavedBytes(const std::vector<char>& dropped) const {
  int64_t total = 0;
  for (ValueId root : KeptWith(dropped).roots) {
    Result<int64_t> bytes = program_.StorageBytes(program_.value(root).type);
    if (!bytes.ok() || __builtin_add_overflow(total, *bytes, &total)) return std::nullopt;
  }
  return total;
}

std::optional<int64_t> RecomputeChoice::SavedBytesOfAll() const {
  return SavedBytes(std::vector<char>(droppable_.size(), 0));
}

}  // namespace interlace
