// cluster.h — the machines a program is to run on: devices, the links between them, hosts; read from a TOML file or
// made from a preset name.
//
//   name = "two nodes"            [device]                  [intra]                 [inter]
//   devices = 16                  kind = "gpu"              alpha_us = 3.0          alpha_us = 8.8
//   per_node = 8                  memory_gib = 80           gb_per_s = 361.4        gb_per_s = 319
//
// Units stand in the names: GB = 1e9 bytes, GiB = 2^30 bytes, us = microseconds. Presets are TOML texts whose comments
// name the source of every constant (presets.cc); `interlace-sim --show-cluster NAME` prints one, to save and edit.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace interlace {

// Slowdowns when classes of work run together (Mist, Algorithm 1): for each set of classes and each member, the factor
// >= 1 by which it takes longer than alone. Classes are bits: 1 compute, 2 device-device, 4 host-to-device, 8
// device-to-host.
struct Interference {
  static constexpr int kClasses = 4;
  std::array<std::array<double, kClasses>, 16> factor;
  Interference() {
    for (auto& row : factor) row.fill(1.0);
  }
  // From 28 numbers in the order of the algorithm: sets of four, three, two classes, lexicographic, members in class
  // order.
  static Interference FromFactors(const std::array<double, 28>& factors);
  // Measured factors of pairs: slower[a][b] is that of class a while b runs, 0 where nothing is known. In a set of three
  // or four what each of the others takes from a class adds up. Where all of them are known that is its factor; else a
  // larger one that it has stays.
  void Measured(const std::array<std::array<double, kClasses>, kClasses>& slower);
  // The time four amounts (ms, or any unit) take that start together: the algorithm as printed.
  double Together(std::array<double, kClasses> alone) const;
};
// The fitted factors for a GPU ("l4", "a100") and a topology, or the nearest fitted topology; nullptr for an unknown
// GPU.
const Interference* FindInterference(std::string_view gpu, int64_t per_node, int64_t nodes);

// One level of links. A ring over n ranks takes alpha * (n - 1) + bytes * (n - 1) / n / bandwidth.
struct LinkSpec {
  double alpha_us = 0;
  double gb_per_s = 0;             // intra: per device and direction; inter: per node and direction
  double all_reduce_alpha_us = 0;  // 0: as above; an all-reduce is two rings
  double all_reduce_gb_per_s = 0;
  // An all-reduce in the switches (NVLS) or along a tree of nodes, where it is the faster one; 0: there is none. Its
  // rate is what so many GB/s become for a buffer: 1 / (1 + (half_mib * nodes^spread / MiB)^power) of them.
  double tree_gb_per_s = 0;
  double tree_pair_gb_per_s = 0;  // of two nodes, which need no tree; 0: as above
  double tree_half_mib = 0, tree_spread = 0, tree_power = 1;
  double error = 0;  // standard deviation of ln(measured / predicted); 0: not known
};
inline constexpr double kOneInTen = 1.2816;  // standard deviations beyond which one of ten lies, on either side

// What whole training steps of a software stack reach of what their kernels reach alone (power, clocks, memory traffic
// between kernels, what the framework adds), and how long its host takes to launch one.
struct StackSpec {
  double products = 1, attention = 1, memory = 1;  // shares of the kernels' rates
  double issue_us = -1;                            // host time of one launch; -1: [device] has it
  double issue_backward = 1;  // of a launch in backward, which autograd does from C++, over one in forward
  double step_us = 0;                              // of every step, whatever its size
  double error = 0;  // standard deviation of ln(measured / predicted) on runs that were not fitted; 0: not known
};
inline constexpr std::array<std::string_view, 6> kStacks = {"kernels",  "ours",  "eager",
                                                            "compiled", "graph", "megatron"};

struct ClusterSpec {
  std::string name;
  int64_t devices = 1;
  int64_t per_node = 1;

  std::string device_name;
  bool cpu = false;  // kind = "cpu": compute and collectives share the cores of the host
  double memory_gib = 0;
  double reserve_gib = 0;  // context and communication library
  double processors = 0;   // that output tiles are spread over; 0: no such effect
  double tflops_half = 0, tflops_single = 0, tflops_double = 0;
  double memory_gb_per_s = 0;
  double cache_mib = 0, cache_gb_per_s = 0;
  double shortest_us = 0;  // shortest kernel
  double issue_us = 0;     // host time to launch one op; 0: the compute lane is the host

  // Matrix products: plain operands, and a transposed second operand (a forward product with a weight).
  double mm_efficiency = 0, mm_wave_exponent = 0, mm_half_k = 0;
  double mm_transposed_efficiency = 0, mm_transposed_wave_exponent = 0, mm_transposed_half_k = 0;
  double memory_efficiency = 0;
  double attention_efficiency = 0, attention_half_sequence = 0;
  double attention_backward_efficiency = 0, attention_backward_half_sequence = 0;

  double h2d_gb_per_s = 0, d2h_gb_per_s = 0;  // per device
  double host_gb_per_s = 0;                   // per node and direction, all devices together
  double host_memory_gb_per_s = 0;            // per node, that its cores read and write together; 0: host_gb_per_s
  double host_memory_gib = 0;                 // per node; 0: not known, no limit
  double copy_us = 0;                         // latency of a copy
  double file_read_gb_per_s = 0, file_write_gb_per_s = 0;  // per node
  bool file_tier = false;      // tier = "file" (cpu): what leaves memory goes to a file, on the lanes h2d and d2h too
  double tier_gb_per_s = 0;    // of a rank and direction at most; 0: as fast as the file store is
  double cores = 0;            // of a host
  double compute_threads = 1;  // of a rank (cpu)
  double comm_core_us_per_mb = 0;  // processor time a collective takes per MB moved (cpu)

  double attention_head_64 = 1;  // rate of attention with heads of 64 over that of 128

  std::string stack = "kernels";  // one of kStacks; "kernels": each as fast as alone
  StackSpec step;                 // of that stack
  std::array<StackSpec, kStacks.size()> stacks;
  std::array<bool, kStacks.size()> has_stack{};

  LinkSpec intra, inter;
  bool coalesce = true;  // a coalesced call of k units has one latency (NCCL, our sockets), else k

  std::map<std::string, double, std::less<>> op_us;  // [ops]: measured microseconds by signature (cost/signature.h)

  std::string interference;                  // "l4", "a100", "none"
  std::vector<double> interference_factors;  // 28, instead of a table

  double HostMemoryGbPerS() const { return host_memory_gb_per_s > 0 ? host_memory_gb_per_s : host_gb_per_s; }
  // The device's memory left for a program.
  int64_t MemoryLimitBytes() const { return static_cast<int64_t>((memory_gib - reserve_gib) * 1073741824.0); }
};

// Parses a cluster file. Error: unknown table or key (did you mean), a rate that is not positive, a missing key,
// devices that do not fill nodes.
Result<ClusterSpec> ParseCluster(std::string_view text, std::string_view file);
// The text of "<gpu>-<count>": h100-80gb-32, a100-40gb-8, l4-24gb-4, local-2; with ":<stack>" behind it of another
// software stack. Error: unknown name or stack (did you mean), bad count.
Result<std::string> PresetCluster(std::string_view name);
std::vector<std::string_view> PresetNames();
// The fitted factors of its table for so many nodes. What a collective takes from compute goes with the rate of its
// data: fitted were links between nodes at a fifth of the rate within. In whole steps (any stack but "kernels") nodes
// whose links reach half of it are as one: measured on 128 to 512 H100 (bench/fit_presets.py).
const Interference* InterferenceOn(const ClusterSpec& cluster, int64_t per_node, int64_t nodes);
// A preset when `text` is one line without '=', else a file's text.
Result<ClusterSpec> LoadCluster(std::string_view text, std::string_view file);

}  // namespace interlace
