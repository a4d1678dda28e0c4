// state_store.h — the tensors that outlive a step, by name. They are apart from plans, so that another program with the
// same states can go on with them.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "base/result.h"
#include "ir/program.h"
#include "runtime/view.h"

namespace interlace {

// The name under which a state is kept: "state u3.exp_avg".
std::string StateKey(const State& state);

class StateStore {
 public:
  explicit StateStore(c10::Device device) : device_(device) {}
  // Shares the tensors of a store whose program has run: from here on Adopt finds them. Call before the first Adopt.
  void TakeOver(const StateStore& donor);
  // The tensor of that name: the one that is there if its geometry is the same, else fresh zeros. What is not
  // `persistent` means nothing between steps, and is made anew when its geometry differs. Error: the tensor of that
  // name has another geometry, or the store that was taken over has no such persistent tensor. With `out` a fresh
  // tensor has no memory: it lies in the tier, as zeros.
  Result<at::Tensor> Adopt(const std::string& name, const Geometry& geometry, bool persistent, bool out = false);
  // Drops what was not adopted. Error: it holds values that would be lost.
  Status DropOthers();
  int64_t bytes() const;

 private:
  struct Entry {
    at::Tensor tensor;
    Geometry geometry;
    bool persistent = false, adopted = false;
  };
  c10::Device device_;
  bool taken_over_ = false;
  std::map<std::string, Entry> entries_;
};

}  // namespace interlace
