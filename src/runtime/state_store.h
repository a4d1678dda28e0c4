// state_store.h — the tensors that outlive a step, by name. They are apart from plans, so that another program with the
// same states can go on with them.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "base/result.h"
#include "runtime/view.h"

namespace interlace {

class StateStore {
 public:
  explicit StateStore(c10::Device device) : device_(device) {}
  // The tensor of that name: the one that is there if its geometry is the same, else fresh zeros. Error: the name is
  // taken by a tensor of another geometry.
  Result<at::Tensor> Adopt(const std::string& name, const Geometry& geometry);
  // Drops what was not adopted since the last call of BeginAdoption.
  void BeginAdoption();
  void DropOthers();
  int64_t bytes() const;

 private:
  struct Entry {
    at::Tensor tensor;
    Geometry geometry;
    bool adopted = false;
  };
  c10::Device device_;
  std::map<std::string, Entry> entries_;
};

}  // namespace interlace
