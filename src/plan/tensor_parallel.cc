#include "plan/tensor_parallel.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <unordered_map>

#include "passes/tensor/cutter.h"

namespace interlace::plan {
namespace {

constexpr int64_t kMaxDegree = int64_t{1} << 20;
constexpr int kTrials = 32;  // two expressions may be the same number always

bool IsPrime(int64_t n) {
  for (int64_t i = 2; i * i <= n; ++i) {
    if (n % i == 0) return false;
  }
  return n > 1;
}

int64_t NextPrime(int64_t n) {
  while (!IsPrime(++n)) {
  }
  return n;
}

template <typename F>
void ForEachDim(Arg& arg, F&& f) {
  if (arg.kind == Arg::Kind::kInt) f(arg.integer);
  for (Arg& item : arg.list) ForEachDim(item, f);
}

// Of all values.
template <typename F>
void ForEachDim(Program& program, F&& f) {
  for (ValueId id = 0; id < program.num_values(); ++id) {
    if (!program.HasValue(id)) continue;
    Value& value = program.value(id);
    for (Dim& size : value.type.sizes) f(size);
    for (Dim& stride : value.type.strides) f(stride);
    f(value.offset);
  }
}

// The expression with a symbol in place of a number that is a factor in it.
Dim Renamed(DimTable& dims, Dim dim, const std::string& number, const std::string& symbol) {
  const std::string text = dims.ToString(dim);
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find_first_of("+-*/%(),", at), text.size());
    const std::string word = text.substr(at, end - at);
    out += word == number ? symbol : word;
    if (end < text.size()) out += text[end];
    at = end + 1;
  }
  const Result<Dim> parsed = dims.Parse(out);
  return parsed.ok() ? *parsed : dim;
}

bool RoundsVocabulary(const ModelText& model) {
  return model.vocab % LargestTensorParallel(model) != 0;
}

// Numbers for the symbols, at which all sizes of the program differ: of the largest degree, and primes.
Binding SampleOf(Program& program, const ModelText& model) {
  const int64_t degree = LargestTensorParallel(model);
  int64_t b = 101, s = 103, vocab = NextPrime(model.vocab / degree);
  Binding sample;
  for (int trial = 0; trial < kTrials; ++trial) {
    sample = {{"b", b}, {"s", degree * s}, {"vocab", degree * vocab}, {"tp", degree}};
    std::unordered_map<int64_t, Dim> found;
    bool differ = true;
    ForEachDim(program, [&](Dim dim) {
      const Result<int64_t> number = program.dims.Evaluate(dim, sample);
      if (!number.ok()) return;
      const bool apart = !dim.is_const() || *number == 0 || (*number % b != 0 && *number % s != 0);
      differ = differ && apart && found.emplace(*number, dim).first->second == dim;
    });
    if (differ) break;
    b = NextPrime(s), s = NextPrime(b), vocab = NextPrime(vocab);
  }
  return sample;
}

}  // namespace

int32_t LargestTensorParallel(const ModelText& model) {
  bool cuts = false;
  int64_t largest = std::gcd(model.heads, model.kv_heads);
  const Program& block = model.programs[static_cast<int>(Role::kBlock)];
  for (const Param& param : block.params) {
    for (const ParallelParameter& cut : model.parallel) {
      const std::vector<Dim>& sizes = block.value(param.value).type.sizes;
      if (cut.name != param.name || cut.dim < 0 || cut.dim >= static_cast<int32_t>(sizes.size())) continue;
      if (!sizes[cut.dim].is_const() || cut.blocks < 1) return 1;  // what divides it is not known
      cuts = true;
      largest = std::gcd(largest, sizes[cut.dim].value / cut.blocks);
    }
  }
  return cuts ? static_cast<int32_t>(std::clamp<int64_t>(largest, 1, kMaxDegree)) : 1;
}

Status CutForTensorParallel(Program& program, const ModelText& model) {
  Phase* phase = program.MicroBatchPhase();
  if (phase == nullptr) return MakeError("the layer's program has no single micro-batch phase");
  program.symbols.push_back({"tp", 1, kMaxDegree});
  program.symbols.push_back({"rank_tp", 0, kMaxDegree});
  if (RoundsVocabulary(model)) {
    const std::string number = std::to_string(model.vocab);
    auto rename = [&](Dim& dim) { dim = Renamed(program.dims, dim, number, "vocab"); };
    ForEachDim(program, rename);
    for (OpId id = 0; id < program.num_ops(); ++id) {
      for (Arg& arg : program.op(id).args) ForEachDim(arg, rename);
    }
    program.symbols.push_back({"vocab", model.vocab, model.vocab});
  }
  tensor::Cutter cutter(program, *phase, {.axis = "tp", .regather = true, .sample = SampleOf(program, model)});
  for (Param& param : program.params) {
    for (const ParallelParameter& cut : model.parallel) {
      if (cut.name == param.name) INTERLACE_TRY(cutter.CutParam(param, cut.dim, cut.blocks));
    }
  }
  for (const char* name : {"hidden", "hidden.grad"}) INTERLACE_TRY(cutter.CutActivation(name, 1));
  INTERLACE_TRY(cutter.Run());
  program.Compact();
  return Ok{};
}

Binding BindingOf(const ModelText& model, int64_t micro_batch, int64_t sequence, int64_t tp) {
  Binding binding{{"b", micro_batch}, {"s", sequence}, {"tp", tp}, {"rank_tp", 0}};
  if (RoundsVocabulary(model)) binding["vocab"] = model.vocab;
  return binding;
}

}  // namespace interlace::plan
