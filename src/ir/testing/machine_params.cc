// First and last values of parameters. Values are drawn for whole parameters, so that they do not depend on placement:
// each rank takes the parts of those that a mesh axis cuts, and of flat units its shard.
#include <algorithm>
#include <cstring>

#include "ir/testing/machine.h"

namespace interlace::testing {

// By element of this rank's part: which element of the whole parameter it is, and in `count` how many that has.
std::vector<size_t> Machine::ElementsOf(const Param& param, int64_t rank, size_t& count) const {
  const std::vector<int64_t> part = Sizes(param.value);
  std::vector<int64_t> whole = part;
  for (const Cut& cut : param.cuts) whole[static_cast<size_t>(cut.dim)] *= program_.AxisSize(cut.axis);
  count = Count(whole);
  std::vector<size_t> out(Count(part));
  std::vector<int64_t> at(part.size(), 0);
  for (size_t& element : out) {
    std::vector<int64_t> place = at, size = part;
    for (size_t k = param.cuts.size(); k-- > 0;) {  // the last cut was made of what the others left
      const Cut& cut = param.cuts[k];
      const auto d = static_cast<size_t>(cut.dim);
      const int64_t ranks = program_.AxisSize(cut.axis), piece = size[d] / cut.blocks;
      place[d] = place[d] / piece * piece * ranks + Coordinate(rank, cut.axis) * piece + place[d] % piece;
      size[d] *= ranks;
    }
    element = 0;
    for (size_t d = 0; d < whole.size(); ++d)
      element = element * static_cast<size_t>(whole[d]) + static_cast<size_t>(place[d]);
    for (size_t d = part.size(); d-- > 0 && ++at[d] == part[d];) at[d] = 0;
  }
  return out;
}

Dense Machine::InitialParam(const Param& param, int64_t rank) const {
  const DType dtype = program_.value(param.value).type.dtype;
  Dense out{Sizes(param.value), std::vector<double>(Count(Sizes(param.value)))};
  const auto given = options_.params.find(param.name);
  const uint64_t key = Mix(options_.seed, HashText(param.name));
  size_t count = 0;
  const std::vector<size_t> elements = ElementsOf(param, rank, count);
  for (size_t i = 0; i < out.data.size(); ++i) {
    const bool have = given != options_.params.end() && elements[i] < given->second.size();
    out.data[i] = RoundTo(dtype, have ? given->second[elements[i]] : Uniform(Mix(key, elements[i])) - 0.5);
  }
  return out;
}

Dense Machine::Flat(const Unit& unit, int64_t rank) const {
  Dense flat{{unit.numel}, std::vector<double>(unit.numel, 0.0)};
  for (const Param& param : program_.params) {
    if (param.unit != unit.id) continue;
    Dense value = InitialParam(param, rank);
    std::copy(value.data.begin(), value.data.end(), flat.data.begin() + param.unit_offset);
  }
  return flat;
}

Status Machine::InitStates() {
  for (const State& state : program_.states) {
    int64_t count = Count(Sizes(state.value));
    Dense first{Sizes(state.value), std::vector<double>(count, 0.0)};
    bool weights = state.unit != kNone && (state.role == "shard" || state.role == "full");
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      if (program_.RootOf(state.value) == state.value) INTERLACE_TRY(Allocate(rank, state.value));
      if (!state.persistent) continue;
      if (weights) {
        const Unit& unit = program_.units[state.unit];
        Dense flat = Flat(unit, rank);
        int64_t begin = count == unit.numel ? 0 : Coordinate(rank, unit.axis) * unit.shard;
        first.data.assign(flat.data.begin() + begin, flat.data.begin() + begin + count);
      }
      INTERLACE_TRY(Write(rank, state.value, first));
    }
  }
  return Ok{};
}

Result<std::map<std::string, std::vector<double>>> Machine::FinalParams() const {
  std::map<std::string, std::vector<double>> out;
  for (const Param& param : program_.params) {
    int64_t count = Count(Sizes(param.value));
    ValueId full = param.unit == kNone ? kNone : program_.FindState(param.unit, "full");
    ValueId shard = param.unit == kNone ? kNone : program_.FindState(param.unit, "shard");
    std::vector<double>& whole = out[param.name];
    std::vector<bool> known;  // by element of the whole
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      std::vector<double> values;
      if (shard != kNone) {
        for (int64_t peer : Peers(rank, program_.units[param.unit].axis)) {
          INTERLACE_ASSIGN(Dense part, Read(peer, shard));
          values.insert(values.end(), part.data.begin(), part.data.end());
        }
      } else {
        INTERLACE_ASSIGN(Dense all, Read(rank, full != kNone ? full : param.value));
        values = std::move(all.data);
      }
      const int64_t begin = shard != kNone || full != kNone ? param.unit_offset : 0;
      if (begin + count > static_cast<int64_t>(values.size()))
        return MakeError("parameter '", param.name, "' lies outside its unit");
      size_t elements = 0;
      const std::vector<size_t> element = ElementsOf(param, rank, elements);
      whole.resize(elements);
      known.resize(elements, false);
      for (size_t i = 0; i < element.size(); ++i) {
        const double value = values[static_cast<size_t>(begin) + i];
        if (known[element[i]] && std::memcmp(&whole[element[i]], &value, sizeof(value)) != 0) {
          return MakeError("rank ", rank, " ends with other values of parameter '", param.name, "' than rank 0");
        }
        whole[element[i]] = value;
        known[element[i]] = true;
      }
    }
  }
  return out;
}

}  // namespace interlace::testing
