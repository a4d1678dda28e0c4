// generator.h — seed and offset, taken by the host when an op is issued, as CUDA's Philox generator does. The numbers are
// the CPU's: at offset 0 those of a CPU generator with this seed.
#pragma once
#include <ATen/core/Generator.h>

namespace soft {

class Generator final : public c10::GeneratorImpl {
 public:
  Generator();
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  static c10::DeviceType device_type() { return c10::kPrivateUse1; }
  uint64_t Take() {  // the seed of the next op
    const uint64_t offset = offset_++;
    return offset == 0 ? seed_ : seed_ ^ (offset * 0x9e3779b97f4a7c15u);
  }

 private:
  Generator* clone_impl() const override {
    auto* g = new Generator;
    g->seed_ = seed_, g->offset_ = offset_;
    return g;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

}  // namespace soft
