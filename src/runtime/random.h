// random.h — random streams keyed by what an op is, not by when it runs: (seed, step, micro-batch, rank, op key).
// Moving, repeating or resuming an op cannot change its numbers. `compat` mode uses torch's default generator in
// program order instead, for comparison with eager runs.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace interlace {

// A strong mix of five numbers into 64 bits (SplitMix64's finalizer, Steele et al. 2014, applied in a chain).
uint64_t MixKey(uint64_t seed, uint64_t step, uint64_t micro_batch, uint64_t rank, uint64_t key);

class KeyedRandom {
 public:
  KeyedRandom(c10::Device device, uint64_t seed, uint64_t rank);

  void SetPosition(uint64_t step, uint64_t micro_batch) { step_ = step, micro_batch_ = micro_batch; }
  // Our own generator, seeded for this op. The same object every time: use it before the next call.
  // `micro`: of several micro-batches that run side by side, the first of which the position is.
  const at::Generator& For(int64_t key, int64_t micro = 0);
  // For ops without a generator argument: seeds the device's default generator and restores it when destroyed.
  class DefaultScope {
   public:
    DefaultScope(KeyedRandom& random, int64_t key, int64_t micro = 0);
    ~DefaultScope();
    DefaultScope(const DefaultScope&) = delete;
    DefaultScope& operator=(const DefaultScope&) = delete;

   private:
    at::Generator generator_;
    at::Tensor saved_;
  };

 private:
  uint64_t Seed(int64_t key, int64_t micro) const {
    return MixKey(seed_, step_, micro_batch_ + static_cast<uint64_t>(micro), rank_, static_cast<uint64_t>(key));
  }
  c10::Device device_;
  uint64_t seed_, rank_, step_ = 0, micro_batch_ = 0;
  at::Generator generator_;
};

}  // namespace interlace
