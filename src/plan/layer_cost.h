// layer_cost.h — what one layer of one kind costs on one device, for one micro-batch size and tensor-parallel degree.
//
// Derived from the layer's captured program, whose dimensions are symbolic in b (micro-batch), s (sequence) and tp.
#pragma once

#include <compare>
#include <cstdint>

#include "base/result.h"
#include "cost/cluster.h"

namespace interlace::plan {

enum class Role : uint8_t { kEmbedding, kBlock, kHead };
inline constexpr int kRoles = 3;  // Role as an index

struct LayerCost {
  double forward_us = 0, backward_us = 0;        // kernels alone
  double tp_forward_us = 0, tp_backward_us = 0;  // collectives of tensor and sequence parallel (device to device)
  double recompute_full_us = 0, recompute_selective_us = 0;        // compute that checkpointing adds to the backward
  double tp_recompute_full_us = 0, tp_recompute_selective_us = 0;  // and its collectives
  int64_t parameters = 0;                                          // elements of this tensor-parallel rank
  int64_t tied = 0;                                                // of the head's, those that are the embedding's own
  int64_t largest_unit = 0;                                     // elements gathered together at most (ZeRO-3 buffers)
  int64_t saved_kept = 0, saved_selective = 0, saved_full = 0;  // bytes that one micro-batch leaves between the passes
  int64_t work_forward = 0, work_backward = 0;                  // peak beyond weights, gradients and what is saved
  int64_t work_backward_selective = 0, work_backward_full = 0;  // the same where the block is recomputed first
  int64_t boundary = 0;  // bytes of the activation that enters (and leaves) the layer, one micro-batch
};

// How this runtime trains a stage without tensor parallel.
struct RunSetting {
  int32_t dp = 1, zero = 0;
  bool accumulates = false;  // more than one micro-batch a step
  bool receives = true;      // reductions receive into memory that counts (CPU transports)
  bool whole = true;         // the model is one stage; else a tied parameter has a copy on each that uses it
  friend auto operator<=>(const RunSetting&, const RunSetting&) = default;
};
// What a layer takes of a device then (run_layer.h).
struct RunCost {
  int64_t weights = 0, gradients = 0, states = 0;  // elements that the rank holds
  int64_t units = 0;                               // transfers of each kind
  int64_t work_forward = 0, work_backward = 0;     // as in LayerCost, with what moves beside the layer
  int64_t work_backward_selective = 0, work_backward_full = 0;
};

// Where a stage's model takes its layers' costs from: a captured model, or a table in a test. A model's blocks are
// alike.
class LayerSource {
 public:
  virtual ~LayerSource() = default;
  virtual int32_t blocks() const = 0;
  // The tensor-parallel degrees that the model's sizes allow are 1 and divisors of this.
  virtual int32_t largest_tp() const = 0;
  // Error: sizes that do not divide, a count beyond 64 bits.
  virtual Result<LayerCost> Cost(Role role, int32_t micro_batch, int32_t tp) const = 0;
  // Costs from now on are those of this cluster; not while anybody asks. What does not depend on it is kept.
  virtual void MoveTo(const ClusterSpec&) {}
  // Error: as above; a source without programs.
  virtual Result<RunCost> AsRun(Role role, int32_t micro_batch, const RunSetting& setting) const;
};

}  // namespace interlace::plan
