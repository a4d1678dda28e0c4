#include "runtime/rule_loops.h"

#include <ATen/ops/from_blob.h>
#include <dlfcn.h>

#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>

#include "ir/rule_loop.h"
#include "runtime/view.h"

namespace interlace {

namespace {

struct Entry {
  RuleForm form;
  int states = 0;
  c10::ScalarType dtype = at::kFloat;
  RulePlace loop = nullptr;
};

// By the names of the functions. Forms are as many as optimizers and dtypes in a process, and executors point to them.
struct Table {
  std::mutex mutex;
  std::map<std::string, Entry> entries;
};
Table& TheTable() {
  static Table table;
  return table;
}

// Numbers of both signs around 1, and what arithmetic treats apart.
std::vector<at::Tensor> Drawn(const Entry& entry, int64_t numel) {
  using Limits = std::numeric_limits<double>;
  constexpr double kInfinity = Limits::infinity();
  constexpr double kSpecial[] = {0.0,  -0.0,  1.0,   -1.0,      0.5,        1e-40,
                                 6e-8, 65504, -1e38, kInfinity, -kInfinity, Limits::quiet_NaN()};
  uint64_t state = 1;
  const auto draw = [&state] {  // PCG's multiplier
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 33;
  };
  std::vector<at::Tensor> flats;
  for (int f = 0; f < 2 + entry.states; ++f) {
    std::vector<double> values(numel);
    for (double& x : values) {
      x = static_cast<double>(draw()) * 0x1p-30 - 1;
      if (draw() % 8 == 0) x = kSpecial[draw() % std::size(kSpecial)];
    }
    flats.push_back(at::from_blob(values.data(), {numel}, at::kDouble).to(entry.dtype, false, /*copy=*/true));
  }
  return flats;
}

bool SameBits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.to(at::kDouble), y = b.to(at::kDouble);
  const double *const p = x.const_data_ptr<double>(), *const q = y.const_data_ptr<double>();
  for (int64_t i = 0; i < x.numel(); ++i) {
    const bool none = std::isnan(p[i]) && std::isnan(q[i]);
    if (!none && std::bit_cast<uint64_t>(p[i]) != std::bit_cast<uint64_t>(q[i])) return false;
  }
  return true;
}

bool Agrees(const Entry& entry, RuleLoop loop) {
  std::vector<double> numbers;
  for (int i = 0; i < entry.form.numbers; ++i) numbers.push_back(1.0 / (i + 1.7));
  for (const double scale : {1.0, 0.3}) {
    const int64_t numel = 1000 + entry.states;
    const std::vector<at::Tensor> ours = Drawn(entry, numel), theirs = Drawn(entry, numel);
    RuleStep(entry.form, ours, numbers, scale);
    RuleStep(entry.form, theirs, numbers, scale, loop);
    for (size_t f = 0; f < ours.size(); ++f) {
      if (!SameBits(ours[f], theirs[f])) return false;
    }
  }
  return true;
}

}  // namespace

const RulePlace* PlaceOf(const RuleForm& form, int states, c10::ScalarType dtype) {
  const std::optional<DType> known = DTypeOf(dtype);
  if (!known || !IsFloating(*known) || DTypeBytes(*known) < 2) return nullptr;
  const std::string name = LoopOf(form, states, *known).name;
  Table& table = TheTable();
  const std::lock_guard lock(table.mutex);
  const auto [at, added] = table.entries.try_emplace(name);
  Entry& entry = at->second;
  if (added) entry.form = form, entry.states = states, entry.dtype = dtype;
  return &entry.loop;
}

Result<std::vector<std::string>> UseRuleLoops(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: steps may be in it
  if (library == nullptr) return MakeError(dlerror());
  std::vector<std::string> left;
  Table& table = TheTable();
  const std::lock_guard lock(table.mutex);
  for (auto& [name, entry] : table.entries) {
    void* const function = dlsym(library, name.c_str());
    if (function == nullptr || entry.loop.load() != nullptr) continue;
    const auto loop = reinterpret_cast<RuleLoop>(function);
    if (Agrees(entry, loop)) {
      entry.loop.store(loop);
    } else {
      left.push_back(name);
    }
  }
  return left;
}

}  // namespace interlace
