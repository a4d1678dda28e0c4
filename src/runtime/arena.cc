#include "runtime/arena.h"

#include <algorithm>

namespace interlace {

Result<std::unique_ptr<StepArena>> StepArena::Create(const Program& program, const std::vector<Geometry>& geometry,
                                                     const ProgramNeeds& needs, const std::vector<bool>& left_out,
                                                     c10::Device device) {
  std::unique_ptr<StepArena> arena(new StepArena(program, geometry));
  MemoryPlanOptions options;
  options.receive_buffers = device.is_cpu();
  options.left_out = left_out;
  for (const std::vector<OpNeeds>& phase : needs) {
    std::vector<int64_t>& workspace = options.workspace.emplace_back();
    for (const OpNeeds& op : phase) workspace.push_back(op.workspace);
  }
  INTERLACE_ASSIGN(arena->plan_, PlanMemory(program, options));
  return arena;
}

Status StepArena::TakeMemory(c10::Device device) {
  INTERLACE_ASSIGN(std::unique_ptr<ArenaMemory> memory, ArenaMemory::Create(plan_.taken_bytes, device));
  memory_ = std::move(memory);
  return Ok{};
}

c10::Storage StepArena::StorageAt(int32_t block, int64_t bytes) const {
  auto* const keep = new std::shared_ptr<ArenaMemory>(memory_);
  c10::DataPtr data(
      memory_->data() + plan_.OffsetOf(block), keep,
      [](void* kept) { delete static_cast<std::shared_ptr<ArenaMemory>*>(kept); }, memory_->device());
  return c10::Storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes), std::move(data),
                      /*allocator=*/nullptr,
                      /*resizable=*/false);
}

void StepArena::AddTensors(int32_t variant, std::vector<at::Tensor>& tensors) const {
  const std::vector<int32_t>& block_of = plan_.variants[variant].block_of;
  for (ValueId id = 0; id < static_cast<ValueId>(block_of.size()); ++id) {
    if (block_of[id] < 0 || tensors[id].defined()) continue;  // a state that moves has storage of its own
    Geometry whole = geometry_[id];
    whole.offset = 0;
    tensors[id] = MakeView(StorageAt(block_of[id], whole.end_bytes()), whole);
  }
  for (ValueId id = 0; id < program_.num_values(); ++id) {
    if (!program_.HasValue(id) || program_.RootOf(id) == id || tensors[id].defined()) continue;
    const ValueId root = program_.RootOf(id);
    if (block_of[root] < 0 || geometry_[id].end_bytes() > geometry_[root].end_bytes()) continue;
    tensors[id] = MakeView(tensors[root].storage(), geometry_[id]);
  }
}

at::Tensor StepArena::ReceiveBuffer(int32_t variant, int32_t place) const {
  const int32_t block = plan_.variants[variant].receive[place];
  if (block < 0) return {};
  Geometry flat;
  flat.dtype = c10::ScalarType::Byte;
  flat.sizes = {plan_.blocks[block].bytes};
  flat.strides = {1};
  return MakeView(StorageAt(block, plan_.blocks[block].bytes), flat);
}

void StepArena::Expected(int32_t variant, int32_t place, const OpNeeds& needs, std::vector<ExpectedBlock>& out) const {
  const PlanVariant& v = plan_.variants[variant];
  for (const OpNeeds::Block& need : needs.blocks) {
    ExpectedBlock& block = out.emplace_back();
    block.bytes = need.bytes;
    const bool result = need.where == OpNeeds::Block::Where::kResult && v.block_of[need.root] >= 0;
    // What is larger than its result shows (embedding_bag's offsets) would reach into what lies behind; it is copied.
    if (result && ArenaBytes(need.bytes) <= ArenaBytes(geometry_[need.root].end_bytes())) {
      block.place = memory_->data() + plan_.OffsetOf(v.block_of[need.root]);
      block.exact = true;
    } else if (need.where == OpNeeds::Block::Where::kInside && v.workspace[place] >= 0) {
      block.place = memory_->data() + plan_.OffsetOf(v.workspace[place]) + need.offset;
    }
  }
}

OpNeeds NeedsOf(const std::vector<AskedBlock>& log, const std::vector<std::pair<const void*, ValueId>>& results) {
  OpNeeds needs;
  std::vector<ArenaBlock> inside;
  std::vector<size_t> which;
  for (const AskedBlock& asked : log) {
    OpNeeds::Block& block = needs.blocks.emplace_back();
    block.bytes = asked.bytes;
    const auto result = std::find_if(results.begin(), results.end(), [&](const auto& r) {
      return r.first == (asked.result_of != nullptr ? asked.result_of : asked.block);
    });
    if (result != results.end()) {
      block.where = OpNeeds::Block::Where::kResult;
      block.root = result->second;
    } else if (asked.freed >= 0) {
      block.where = OpNeeds::Block::Where::kInside;
      inside.push_back({ArenaBytes(asked.bytes), {{asked.asked, asked.freed}}});
      which.push_back(needs.blocks.size() - 1);
    }
  }
  const ArenaPacking packing = PackArena(inside);
  for (size_t i = 0; i < which.size(); ++i) needs.blocks[which[i]].offset = packing.offsets[i];
  needs.workspace = packing.top;
  return needs;
}

}  // namespace interlace
