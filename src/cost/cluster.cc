#include "cost/cluster.h"

#include <algorithm>

#include "base/scan.h"
#include "base/suggest.h"
#include "cost/toml.h"

namespace interlace {
namespace {

enum class Rule : uint8_t { kPositive, kNotNegative, kShare };  // kShare: above 0, at most 1

struct NumberKey {
  std::string_view table, key;
  double ClusterSpec::*member;
  Rule rule;
  bool required;
  double most = 1e12;  // what no machine has; a number above it is in another unit
};

constexpr NumberKey kNumbers[] = {
    {"device", "memory_gib", &ClusterSpec::memory_gib, Rule::kPositive, true, 10'000},
    {"device", "reserve_gib", &ClusterSpec::reserve_gib, Rule::kNotNegative, false},
    {"device", "processors", &ClusterSpec::processors, Rule::kNotNegative, false},
    {"device", "tflops_half", &ClusterSpec::tflops_half, Rule::kPositive, true, 1e5},
    {"device", "tflops_single", &ClusterSpec::tflops_single, Rule::kPositive, true, 1e5},
    {"device", "tflops_double", &ClusterSpec::tflops_double, Rule::kPositive, true, 1e5},
    {"device", "memory_gb_per_s", &ClusterSpec::memory_gb_per_s, Rule::kPositive, true, 1e6},
    {"device", "cache_mib", &ClusterSpec::cache_mib, Rule::kNotNegative, false},
    {"device", "cache_gb_per_s", &ClusterSpec::cache_gb_per_s, Rule::kNotNegative, false},
    {"device", "shortest_us", &ClusterSpec::shortest_us, Rule::kNotNegative, true},
    {"device", "issue_us", &ClusterSpec::issue_us, Rule::kNotNegative, true},
    {"kernels", "mm_efficiency", &ClusterSpec::mm_efficiency, Rule::kShare, true},
    {"kernels", "mm_wave_exponent", &ClusterSpec::mm_wave_exponent, Rule::kNotNegative, true},
    {"kernels", "mm_half_k", &ClusterSpec::mm_half_k, Rule::kNotNegative, true},
    {"kernels", "mm_transposed_efficiency", &ClusterSpec::mm_transposed_efficiency, Rule::kShare, true},
    {"kernels", "mm_transposed_wave_exponent", &ClusterSpec::mm_transposed_wave_exponent, Rule::kNotNegative, true},
    {"kernels", "mm_transposed_half_k", &ClusterSpec::mm_transposed_half_k, Rule::kNotNegative, true},
    {"kernels", "memory_efficiency", &ClusterSpec::memory_efficiency, Rule::kShare, true},
    {"kernels", "attention_efficiency", &ClusterSpec::attention_efficiency, Rule::kShare, true},
    {"kernels", "attention_half_sequence", &ClusterSpec::attention_half_sequence, Rule::kNotNegative, true},
    {"kernels", "attention_backward_efficiency", &ClusterSpec::attention_backward_efficiency, Rule::kShare, true},
    {"kernels", "attention_backward_half_sequence", &ClusterSpec::attention_backward_half_sequence, Rule::kNotNegative,
     true},
    {"kernels", "attention_head_64", &ClusterSpec::attention_head_64, Rule::kShare, false},
    {"host", "h2d_gb_per_s", &ClusterSpec::h2d_gb_per_s, Rule::kPositive, true},
    {"host", "d2h_gb_per_s", &ClusterSpec::d2h_gb_per_s, Rule::kPositive, true},
    {"host", "host_gb_per_s", &ClusterSpec::host_gb_per_s, Rule::kPositive, true},
    {"host", "memory_gb_per_s", &ClusterSpec::host_memory_gb_per_s, Rule::kPositive, false},
    {"host", "memory_gib", &ClusterSpec::host_memory_gib, Rule::kPositive, false},
    {"host", "copy_us", &ClusterSpec::copy_us, Rule::kNotNegative, true},
    {"host", "file_read_gb_per_s", &ClusterSpec::file_read_gb_per_s, Rule::kPositive, true},
    {"host", "file_write_gb_per_s", &ClusterSpec::file_write_gb_per_s, Rule::kPositive, true},
    {"host", "tier_gb_per_s", &ClusterSpec::tier_gb_per_s, Rule::kPositive, false},
    {"host", "cores", &ClusterSpec::cores, Rule::kPositive, true},
    {"host", "compute_threads", &ClusterSpec::compute_threads, Rule::kPositive, false},
    {"host", "comm_core_us_per_mb", &ClusterSpec::comm_core_us_per_mb, Rule::kNotNegative, false},
};

struct LinkKey {
  std::string_view key;
  double LinkSpec::*member;
  Rule rule;
  bool required;
  double most = 1e12;
};
constexpr LinkKey kLinks[] = {
    {"alpha_us", &LinkSpec::alpha_us, Rule::kNotNegative, true},
    {"gb_per_s", &LinkSpec::gb_per_s, Rule::kPositive, true, 1e6},
    {"all_reduce_alpha_us", &LinkSpec::all_reduce_alpha_us, Rule::kNotNegative, false},
    {"all_reduce_gb_per_s", &LinkSpec::all_reduce_gb_per_s, Rule::kPositive, false},
    {"tree_gb_per_s", &LinkSpec::tree_gb_per_s, Rule::kPositive, false},
    {"tree_pair_gb_per_s", &LinkSpec::tree_pair_gb_per_s, Rule::kPositive, false},
    {"tree_half_mib", &LinkSpec::tree_half_mib, Rule::kNotNegative, false},
    {"tree_spread", &LinkSpec::tree_spread, Rule::kShare, false},
    {"tree_power", &LinkSpec::tree_power, Rule::kShare, false},
    {"error", &LinkSpec::error, Rule::kNotNegative, false},
};

// Of a table [step.STACK]. What is written once may stay in a cache, so `memory` may be above the kernels' own rate.
struct StepKey {
  std::string_view key;
  double StackSpec::*member;
  double least, most;
};
constexpr StepKey kSteps[] = {
    {"products", &StackSpec::products, 0.05, 1},   {"attention", &StackSpec::attention, 0.05, 1.5},
    {"memory", &StackSpec::memory, 0.05, 4},       {"issue_us", &StackSpec::issue_us, 0, 1000},
    {"step_us", &StackSpec::step_us, 0, 10000000}, {"issue_backward", &StackSpec::issue_backward, 0, 10},
    {"error", &StackSpec::error, 0, 2},
};
constexpr std::string_view kStepTable = "step.";

// Every other key. The table "" is the top of the file.
constexpr std::pair<std::string_view, std::string_view> kOthers[] = {{"", "name"},
                                                                     {"", "devices"},
                                                                     {"", "per_node"},
                                                                     {"", "stack"},
                                                                     {"device", "name"},
                                                                     {"device", "kind"},
                                                                     {"host", "tier"},
                                                                     {"intra", "coalesce"},
                                                                     {"interference", "table"},
                                                                     {"interference", "factors"}};

constexpr double kLargest = 1e12;  // of any number in a cluster file
constexpr int64_t kMostDevices = int64_t{1} << 20;

class ClusterReader {
 public:
  ClusterReader(std::string_view text, std::string_view file) : text_(text), file_(file) {}

  Result<ClusterSpec> Run() {
    INTERLACE_ASSIGN(entries_, ParseToml(text_, file_));
    for (const TomlEntry& entry : entries_) INTERLACE_TRY(Take(entry));
    for (const NumberKey& k : kNumbers) INTERLACE_TRY(Need(k.table, k.key, k.required));
    for (std::string_view table : {"intra", "inter"}) {
      for (const LinkKey& k : kLinks) INTERLACE_TRY(Need(table, k.key, k.required));
    }
    for (std::string_view key : {"devices", "per_node"}) INTERLACE_TRY(Need("", key, true));
    INTERLACE_TRY(Need("device", "kind", true));
    if (spec_.devices > spec_.per_node && spec_.devices % spec_.per_node != 0) {
      return Bad("", "devices",
                 "devices must fill whole nodes: not a multiple of per_node = " + std::to_string(spec_.per_node));
    }
    if (spec_.reserve_gib >= spec_.memory_gib)
      return Bad("device", "reserve_gib", "reserve_gib leaves no memory of memory_gib");
    if (spec_.file_tier && !spec_.cpu)
      return Bad("host", "tier", "tier = \"file\" needs kind = \"cpu\": accelerators have their tier in host memory");
    if (spec_.tier_gb_per_s > 0 && !spec_.file_tier)
      return Bad("host", "tier_gb_per_s", "tier_gb_per_s needs tier = \"file\"");
    if (!spec_.cpu && spec_.memory_gb_per_s < spec_.h2d_gb_per_s)
      return Bad("device", "memory_gb_per_s", "memory_gb_per_s is less than h2d_gb_per_s brings; is it in TB/s?");
    if (spec_.cache_mib > 0 && spec_.cache_gb_per_s <= 0)
      return Bad("device", "cache_mib", "cache_mib needs cache_gb_per_s");
    if (spec_.name.empty()) spec_.name = std::string(file_);
    INTERLACE_TRY(ChooseStack());
    return std::move(spec_);
  }

 private:
  Error At(const TomlEntry& entry, std::string_view message) const {
    return Scanner(text_, file_).ErrorAt(entry.value_pos, message);
  }
  const TomlEntry* Find(std::string_view table, std::string_view key) const {
    for (const TomlEntry& entry : entries_) {
      if (entry.table == table && entry.key == key) return &entry;
    }
    return nullptr;
  }
  Error Bad(std::string_view table, std::string_view key, std::string_view message) const {
    const TomlEntry* entry = Find(table, key);
    return entry == nullptr ? Error{std::string(message), std::string(file_)} : At(*entry, message);
  }
  Status Need(std::string_view table, std::string_view key, bool required) const {
    if (!required || Find(table, key) != nullptr) return Ok{};
    std::string where = table.empty() ? "" : " in [" + std::string(table) + "]";
    return Error{"the key '" + std::string(key) + "'" + where + " is missing", std::string(file_)};
  }

  Status ChooseStack() {
    constexpr size_t kKernels = 0;
    size_t chosen = kKernels;
    if (const TomlEntry* said = Find("", "stack")) {
      chosen = std::find(kStacks.begin(), kStacks.end(), said->value.text) - kStacks.begin();
      if (chosen == kStacks.size()) {
        return At(*said, "unknown stack '" + said->value.text + "'" +
                             DidYouMean(said->value.text, {kStacks.begin(), kStacks.end()}));
      }
      if (chosen != kKernels && !spec_.has_stack[chosen])
        return At(*said, "there is no table [step." + said->value.text + "], which says what its steps reach");
    }
    spec_.stack = kStacks[chosen];
    spec_.step = spec_.stacks[chosen];
    if (spec_.step.issue_us >= 0) spec_.issue_us = spec_.step.issue_us;
    return Ok{};
  }

  Status Step(const TomlEntry& e) {
    const std::string_view name = std::string_view(e.table).substr(kStepTable.size());
    const auto at = std::find(kStacks.begin(), kStacks.end(), name);
    if (at == kStacks.end())
      return Scanner(text_, file_)
          .ErrorAt(e.key_pos, "no stack is called '" + std::string(name) +
                                  "'; stacks: kernels, ours, eager, compiled, graph, megatron");
    const size_t index = at - kStacks.begin();
    spec_.has_stack[index] = true;
    for (const StepKey& k : kSteps) {
      if (k.key != e.key) continue;
      double value = 0;
      INTERLACE_TRY(Number(e, Rule::kNotNegative, value));
      if (!(value >= k.least && value <= k.most)) {
        return At(e, MakeError("'", e.key, "' is outside of what is possible, ", k.least, " to ", k.most).message);
      }
      spec_.stacks[index].*k.member = value;
      return Ok{};
    }
    std::vector<std::string_view> keys;
    for (const StepKey& k : kSteps) keys.push_back(k.key);
    return Scanner(text_, file_)
        .ErrorAt(e.key_pos, "unknown key '" + e.key + "' in [" + e.table + "]" + DidYouMean(e.key, keys));
  }

  Status Take(const TomlEntry& e) {
    if (e.table.starts_with(kStepTable)) return Step(e);
    for (const NumberKey& k : kNumbers) {
      if (k.table == e.table && k.key == e.key) return Number(e, k.rule, spec_.*k.member, k.most);
    }
    if (e.table == "intra" || e.table == "inter") {
      LinkSpec& link = e.table == "intra" ? spec_.intra : spec_.inter;
      for (const LinkKey& k : kLinks) {
        if (k.key == e.key) return Number(e, k.rule, link.*k.member, k.most);
      }
    }
    if (e.table.empty() && e.key == "name") return Text(e, spec_.name);
    if (e.table.empty() && e.key == "stack") return Text(e, spec_.stack);
    if (e.table.empty() && e.key == "devices") return Count(e, spec_.devices);
    if (e.table.empty() && e.key == "per_node") return Count(e, spec_.per_node);
    if (e.table == "device" && e.key == "name") return Text(e, spec_.device_name);
    if (e.table == "device" && e.key == "kind") {
      std::string kind;
      INTERLACE_TRY(Text(e, kind));
      if (kind != "gpu" && kind != "cpu") return At(e, "kind is \"gpu\" or \"cpu\"");
      spec_.cpu = kind == "cpu";
      return Ok{};
    }
    if (e.table == "host" && e.key == "tier") {
      std::string tier;
      INTERLACE_TRY(Text(e, tier));
      if (tier != "file" && tier != "memory") return At(e, "tier is \"file\" or \"memory\"");
      spec_.file_tier = tier == "file";
      return Ok{};
    }
    if (e.table == "intra" && e.key == "coalesce") {
      if (e.value.kind != TomlValue::Kind::kBool) return At(e, "expected true or false");
      spec_.coalesce = e.value.boolean;
      return Ok{};
    }
    if (e.table == "interference" && e.key == "table") {
      INTERLACE_TRY(Text(e, spec_.interference));
      if (spec_.interference != "none" && FindInterference(spec_.interference, 1, 1) == nullptr) {
        return At(e, "the fitted tables are \"l4\", \"a100\" and \"none\"");
      }
      return Ok{};
    }
    if (e.table == "interference" && e.key == "factors") return Factors(e);
    if (e.table == "ops") return Number(e, Rule::kPositive, spec_.op_us[e.key]);
    return Unknown(e);
  }

  Status Number(const TomlEntry& e, Rule rule, double& out, double most = kLargest) const {
    if (e.value.kind != TomlValue::Kind::kInt && e.value.kind != TomlValue::Kind::kFloat)
      return At(e, "expected a number");
    out = e.value.number;
    if (rule == Rule::kPositive && !(out > 0)) return At(e, "'" + e.key + "' must be above zero");
    if (rule == Rule::kNotNegative && !(out >= 0)) return At(e, "'" + e.key + "' must not be negative");
    if (rule == Rule::kShare && !(out > 0 && out <= 1)) return At(e, "'" + e.key + "' must be above 0 and at most 1");
    const char* unit = most < kLargest ? "; is it in another unit?" : "";
    if (out > most) return At(e, "'" + e.key + "' is too large to be true" + unit);
    return Ok{};
  }
  Status Count(const TomlEntry& e, int64_t& out) const {
    if (e.value.kind != TomlValue::Kind::kInt) return At(e, "expected an integer");
    out = e.value.integer;
    if (out < 1 || out > kMostDevices)
      return At(e, "'" + e.key + "' must be from 1 to " + std::to_string(kMostDevices));
    return Ok{};
  }
  Status Text(const TomlEntry& e, std::string& out) const {
    if (e.value.kind != TomlValue::Kind::kString) return At(e, "expected a string");
    out = e.value.text;
    return Ok{};
  }
  Status Factors(const TomlEntry& e) {
    if (e.value.kind != TomlValue::Kind::kList || e.value.list.size() != 28)
      return At(e, "expected a list of 28 factors");
    for (const TomlValue& v : e.value.list) {
      bool number = v.kind == TomlValue::Kind::kInt || v.kind == TomlValue::Kind::kFloat;
      if (!number || !(v.number >= 1 && v.number <= 1000)) return At(e, "a factor is a number from 1 to 1000");
      spec_.interference_factors.push_back(v.number);
    }
    return Ok{};
  }

  Error Unknown(const TomlEntry& e) const {
    std::vector<std::string_view> keys, tables;
    auto offer = [&](std::string_view table, std::string_view key) {
      if (table == e.table) keys.push_back(key);
      tables.push_back(table);
    };
    for (const NumberKey& k : kNumbers) offer(k.table, k.key);
    for (const LinkKey& k : kLinks) offer("intra", k.key), offer("inter", k.key);
    for (auto [table, key] : kOthers) offer(table, key);
    Scanner at(text_, file_);
    if (keys.empty()) return at.ErrorAt(e.key_pos, "unknown table [" + e.table + "]" + DidYouMean(e.table, tables));
    std::string where = e.table.empty() ? "" : " in [" + e.table + "]";
    return at.ErrorAt(e.key_pos, "unknown key '" + e.key + "'" + where + DidYouMean(e.key, keys));
  }

  std::string_view text_, file_;
  std::vector<TomlEntry> entries_;
  ClusterSpec spec_;
};

}  // namespace

Result<ClusterSpec> ParseCluster(std::string_view text, std::string_view file) {
  return ClusterReader(text, file).Run();
}

Result<ClusterSpec> LoadCluster(std::string_view text, std::string_view file) {
  if (text.find('=') != std::string_view::npos || text.find('\n') != std::string_view::npos)
    return ParseCluster(text, file);
  INTERLACE_ASSIGN(std::string preset, PresetCluster(text));
  return ParseCluster(preset, text);
}

}  // namespace interlace
