#include "runtime/step_inputs.h"

#include <string>

namespace interlace {

namespace {

size_t HyperCount(const Program& program, const Group& group) {
  return group.rule == kNone ? 7 : program.rules[group.rule].RowSize();
}

}  // namespace

Status CheckInputs(const Program& program, const std::vector<Geometry>& geometry, c10::Device device,
                   MicroBatches& micro_batches) {
  if (static_cast<int64_t>(micro_batches.size()) != program.accumulation) {
    return MakeError("the program takes ", program.accumulation, " micro-batches a step, got ", micro_batches.size());
  }
  const auto width = static_cast<size_t>(program.width);
  const size_t count = program.inputs.size() / width;  // of one micro-batch
  for (size_t m = 0; m < micro_batches.size(); ++m) {
    std::vector<at::Tensor>& inputs = micro_batches[m];
    if (inputs.size() != count) {
      std::string names;
      for (size_t i = 0; i < count; ++i) names += (names.empty() ? "" : ", ") + program.inputs[i].name;
      return MakeError("micro-batch ", m, " has ", inputs.size(), " inputs, the program takes ", count, ": ", names);
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Geometry& g = geometry[program.inputs[m % width * count + i].value];
      at::Tensor& tensor = inputs[i];
      const bool defined = tensor.defined();
      if (!defined || !SameSizes(tensor, g) || tensor.device() != device || tensor.layout() != c10::Layout::Strided) {
        return MakeError("input \"", program.inputs[i].name, "\" of micro-batch ", m, ": expected ", Describe(g),
                         " on ", device.str(), ", got ", Describe(tensor),
                         defined ? " on " + tensor.device().str() : "");
      }
      if (tensor.requires_grad() || tensor.is_conj() || tensor.is_neg())
        tensor = tensor.detach().resolve_conj().resolve_neg();
      // Views in the program count from the start of the storage.
      if (!SameStrides(tensor, g) || tensor.storage_offset() != 0) {
        at::Tensor own = Allocate(g, device, false);
        own.copy_(tensor);
        tensor = std::move(own);
      }
    }
  }
  return Ok{};
}

Status CheckHyper(const Program& program, const std::vector<std::vector<double>>& hyper) {
  if (hyper.size() != program.groups.size()) {
    return MakeError("the program has ", program.groups.size(), " optimizer groups, got numbers for ", hyper.size());
  }
  for (size_t i = 0; i < hyper.size(); ++i) {
    const size_t wanted = HyperCount(program, program.groups[i]);
    if (hyper[i].size() != wanted) {
      return MakeError("optimizer group ", program.groups[i].id, " (", program.groups[i].optimizer, ") needs ", wanted,
                       " numbers, got ", hyper[i].size());
    }
    if (program.groups[i].rule == kNone) continue;
    const auto forms = static_cast<double>(program.rules[program.groups[i].rule].forms.size());
    if (!(hyper[i][0] >= 0 && hyper[i][0] < forms)) {
      return MakeError("optimizer group ", program.groups[i].id, " has no form ", hyper[i][0], " of its rule");
    }
  }
  return Ok{};
}

}  // namespace interlace
