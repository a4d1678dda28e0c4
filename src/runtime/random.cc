#include "runtime/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

namespace interlace {

namespace {

uint64_t Finalize(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

uint64_t MixKey(uint64_t seed, uint64_t step, uint64_t micro_batch, uint64_t rank, uint64_t key) {
  uint64_t mixed = Finalize(seed);
  for (uint64_t part : {step, micro_batch, rank, key}) mixed = Finalize(mixed ^ Finalize(part));
  return mixed;
}

KeyedRandom::KeyedRandom(c10::Device device, uint64_t seed, uint64_t rank) : device_(device), seed_(seed), rank_(rank) {
  generator_ =
      device.is_cpu() ? at::detail::createCPUGenerator(seed) : at::globalContext().defaultGenerator(device).clone();
}

const at::Generator& KeyedRandom::For(int64_t key, int64_t micro) {
  // No lock: the generator is ours alone, and one step runs at a time.
  generator_.set_current_seed(Seed(key, micro));
  return generator_;
}

KeyedRandom::DefaultScope::DefaultScope(KeyedRandom& random, int64_t key, int64_t micro)
    : generator_(at::globalContext().defaultGenerator(random.device_)) {
  std::lock_guard<std::mutex> lock(generator_.mutex());
  saved_ = generator_.get_state();
  generator_.set_current_seed(random.Seed(key, micro));
}

KeyedRandom::DefaultScope::~DefaultScope() {
  std::lock_guard<std::mutex> lock(generator_.mutex());
  generator_.set_state(saved_);
}

}  // namespace interlace
