// Bind: symbols become numbers, after their ranges were checked; then every size is checked again, since views that fit
// for any size in range of one capture may not fit for a binding chosen by hand.
#include <algorithm>

#include "base/suggest.h"
#include "ir/program.h"
#include "ir/verifier.h"

namespace interlace {
namespace {

class Binder {
 public:
  Binder(Program& program, const Binding& binding) : program_(program), binding_(binding) {}

  Status Run() {
    INTERLACE_TRY(CheckRanges());
    for (ValueId id = 0; id < program_.num_values(); ++id) {
      if (!program_.HasValue(id)) continue;
      Value& value = program_.value(id);
      for (Dim& dim : value.type.sizes) INTERLACE_TRY(Replace(dim, id));
      for (Dim& dim : value.type.strides) INTERLACE_TRY(Replace(dim, id));
      INTERLACE_TRY(Replace(value.offset, id));
      INTERLACE_TRY(CheckSize(value));
    }
    for (OpId id = 0; id < program_.num_ops(); ++id) {
      Op& op = program_.op(id);
      for (Arg& arg : op.args) INTERLACE_TRY(ReplaceArg(arg));
      for (NamedArg& named : op.named) INTERLACE_TRY(ReplaceArg(named.arg));
      for (NamedArg& attr : op.attrs) INTERLACE_TRY(ReplaceArg(attr.arg));
    }
    for (ValueId id = 0; id < program_.num_values(); ++id) {
      if (!program_.HasValue(id)) continue;
      Status fits = CheckPlace(program_, program_.value(id));
      if (!fits.ok())
        return MakeError(fits.error().message, " under this binding; the model was captured for other sizes");
    }
    std::erase_if(program_.symbols, [&](const Symbol& s) { return binding_.count(s.name) > 0; });
    return Ok{};
  }

 private:
  Status CheckRanges() const {
    std::vector<std::string> names;  // sorted, so that the first error does not depend on hashing
    for (const auto& [name, value] : binding_) names.push_back(name);
    std::sort(names.begin(), names.end());
    for (const std::string& name : names) {
      int64_t min = 0, max = -1;
      std::vector<std::string_view> known;
      for (const Symbol& symbol : program_.symbols) {
        known.push_back(symbol.name);
        if (symbol.name == name) min = symbol.min, max = symbol.max;
      }
      for (const Axis& axis : program_.mesh) {
        if ("rank_" + axis.name == name) max = axis.size - 1;
      }
      if (max < min) return MakeError("the program has no symbol '", name, "'", DidYouMean(name, known));
      int64_t value = binding_.at(name);
      if (value < min || value > max) {
        return MakeError("symbol '", name, "' = ", value, " is out of its range ", min, " to ", max,
                         "; capture the program again for such a size");
      }
    }
    return Ok{};
  }

  Status Replace(Dim& dim, ValueId id) {
    if (dim.is_const()) return Ok{};
    Result<Dim> bound = program_.dims.Substitute(dim, binding_);
    if (!bound.ok()) return MakeError("value %", id, ": ", bound.error().message);
    dim = *bound;
    return Ok{};
  }

  Status ReplaceArg(Arg& arg) {
    if (arg.kind == Arg::Kind::kInt && !arg.integer.is_const()) {
      INTERLACE_ASSIGN(arg.integer, program_.dims.Substitute(arg.integer, binding_));
    }
    for (Arg& item : arg.list) INTERLACE_TRY(ReplaceArg(item));
    return Ok{};
  }

  Status CheckSize(const Value& value) {
    bool numeric = true;
    for (const Dim& size : value.type.sizes) {
      if (size.is_const() && size.value < 0) {
        return MakeError("value %", value.id, " gets the negative size ", size.value, " under this binding");
      }
    }
    for (size_t i = 0; i < value.type.sizes.size(); ++i) {
      numeric = numeric && value.type.sizes[i].is_const() && value.type.strides[i].is_const();
    }
    if (!numeric) return Ok{};
    Result<int64_t> bytes = program_.StorageBytes(value.type);
    if (!bytes.ok()) return MakeError("value %", value.id, ": ", bytes.error().message, " under this binding");
    return Ok{};
  }

  Program& program_;
  const Binding& binding_;
};

}  // namespace

Result<Program> Bind(const Program& program, const Binding& binding) {
  Program out = program.Clone();
  INTERLACE_TRY(Binder(out, binding).Run());
  return out;
}

}  // namespace interlace
