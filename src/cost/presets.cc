// The presets as cluster files. A number without its own comment is from the line above it that has one.
#include <charconv>

#include "base/suggest.h"
#include "cost/cluster.h"

namespace interlace {
namespace {

struct Preset {
  std::string_view name;
  int64_t per_node;  // 0: all devices on one host
  std::string_view text;
};

constexpr std::string_view kH100 = R"(
[device]
name = "H100 SXM5 80GB"
kind = "gpu"
memory_gib = 80
reserve_gib = 7            # accelerator context and NCCL (docs/cost_model.md, memory)
processors = 132           # data sheet, as are the peaks
tflops_half = 989.5
tflops_single = 67
tflops_double = 67
memory_gb_per_s = 3350     # data sheet
cache_mib = 50
cache_gb_per_s = 5500      # assumed: 1.6 times the memory's; no public table at hand
shortest_us = 2.8          # bench/fit_kernels.py: t0 of the H100 rows (pytorch/ao's rule: 2)
issue_us = 2.0             # assumed host time of one launch

[kernels]                  # bench/fit_kernels.py, rows of zzc0721/torch-performance-test-data#79 and vLLM#17126
mm_efficiency = 0.828
mm_wave_exponent = 0.64
mm_half_k = 114
mm_transposed_efficiency = 0.828  # the public rows do not tell them apart
mm_transposed_wave_exponent = 0.64
mm_transposed_half_k = 114
memory_efficiency = 0.79   # gather and scatter kernels reach 0.76 to 0.83: FBGEMM#3993
attention_efficiency = 0.352              # bench/fit_kernels.py: FlashAttention-2, causal, head 128, flash-attention 0251105
attention_half_sequence = 375
attention_backward_efficiency = 0.328
attention_backward_half_sequence = 572

[host]
h2d_gb_per_s = 55.4        # nvbandwidth, Gen5 x16, pinned: stas00/ml-engineering
d2h_gb_per_s = 55.1
host_gb_per_s = 440        # the same source: all eight links at once reach the rate of one
memory_gb_per_s = 320      # 0.78 of 2 sockets of 8 DDR4-3200 channels (AWS p5); STREAM's share as below
memory_gib = 2048          # of a node of eight: AWS p5.48xlarge, instance types
copy_us = 10               # assumed, as Calculon's link latency
file_read_gb_per_s = 3     # assumed: one NVMe drive
file_write_gb_per_s = 2
cores = 96                 # assumed

[intra]
alpha_us = 3.0             # all-reduce of 1 MiB at 39.9 GB/s over 8 GPUs: stas00/ml-engineering 744d01e
gb_per_s = 361.4           # all-gather of 16 GiB: the same source
all_reduce_gb_per_s = 480  # NVLink SHARP: the same source

[inter]                    # 8 x 400 Gb/s a node
alpha_us = 8.8             # bench/fit_collectives.py on nccl_p5_all_gather, 16 and 64 GPUs
gb_per_s = 319
all_reduce_alpha_us = 8.7 # the same on nccl_p5_all_reduce
all_reduce_gb_per_s = 442

[interference]
table = "a100"             # fitted on A100-40GB; nothing public for H100
)";

constexpr std::string_view kA100 = R"(
[device]
name = "A100 SXM4 40GB"
kind = "gpu"
memory_gib = 40
reserve_gib = 7            # accelerator context and NCCL (docs/cost_model.md, memory)
processors = 108           # data sheet, as are the peaks
tflops_half = 312
tflops_single = 19.5
tflops_double = 19.5
memory_gb_per_s = 1555     # data sheet
cache_mib = 40
cache_gb_per_s = 2500      # assumed: 1.6 times the memory's; no public table at hand
shortest_us = 2.8          # bench/fit_kernels.py: t0 of the H100 rows; that of the A100 tables is a host clock
issue_us = 2.0             # assumed host time of one launch

[kernels]                  # bench/fit_kernels.py, op_times_gpt_a100.csv
mm_efficiency = 0.935      # input gradients, 176 rows: error 5.3 %
mm_wave_exponent = 0.82
mm_half_k = 175
mm_transposed_efficiency = 0.864  # forward, 132 rows: error 2.3 %
mm_transposed_wave_exponent = 0.39
mm_transposed_half_k = 388
memory_efficiency = 0.75   # dropout 0.743, gelu 0.750
attention_efficiency = 0.528              # share of the dense rate as fitted on L4 (0.58 of it); no public A100 table at hand
attention_half_sequence = 375             # H100
attention_backward_efficiency = 0.49
attention_backward_half_sequence = 572

[host]
h2d_gb_per_s = 5.9         # 5.2 to 5.75 GiB/s a GPU, all eight at once, AWS p4d: Dazz993/Mist raw data
d2h_gb_per_s = 6.4         # 5.8 to 6.1 GiB/s
host_gb_per_s = 51         # eight times the above
memory_gb_per_s = 220      # 0.78 of 2 sockets of 6 DDR4-2933 channels (AWS p4d): 199 of 256 GB/s at DDR4-2666, AnandTech 11544
memory_gib = 1152          # of a node of eight: AWS p4d.24xlarge, instance types
copy_us = 10               # assumed, as Calculon's link latency
file_read_gb_per_s = 3     # assumed: one NVMe drive
file_write_gb_per_s = 2
cores = 48                 # assumed

[intra]                    # bench/fit_collectives.py: all-reduce of 8 GPUs, comm_a100.csv
alpha_us = 8.4
gb_per_s = 219             # all-gather of 1 to 4 GB over 8 GPUs: mist_concurrency_a100.csv
all_reduce_gb_per_s = 230

[inter]                    # 400 Gb/s a node
alpha_us = 8.8             # EFA, as fitted on p5
gb_per_s = 46              # a 400 Gb/s NIC reaches 46 to 48: nccl-tests#290

[interference]
table = "a100"             # bench/fit_interference.py
)";

constexpr std::string_view kL4 = R"(
[device]
name = "L4 24GB"
kind = "gpu"
memory_gib = 24
reserve_gib = 2            # accelerator context and NCCL over PCIe: assumed
processors = 58            # data sheet, as are the peaks
tflops_half = 121
tflops_single = 30.3
tflops_double = 0.47
memory_gb_per_s = 300      # data sheet
cache_mib = 48
cache_gb_per_s = 950       # torch add of 50 MB in 52.7 us: op_times_l4.csv
shortest_us = 2.2          # op_times_l4.csv: empty ops take 2.2 to 2.5
issue_us = 2.0             # assumed host time of one launch

[kernels]                  # bench/fit_kernels.py, op_times_gpt_l4.csv
mm_efficiency = 0.73       # input gradients, 160 rows: error 13 % (clocks not locked, the power limit sets them)
mm_wave_exponent = 0.78
mm_half_k = 118
mm_transposed_efficiency = 0.412   # forward, 120 rows: error 12 %
mm_transposed_wave_exponent = 0
mm_transposed_half_k = 0
memory_efficiency = 0.77   # gelu 0.770, dropout 0.773
attention_efficiency = 0.62               # 63.9 TFLOP/s at sequence 2048: op_times_l4.csv, clocks not locked
attention_half_sequence = 375             # H100
attention_backward_efficiency = 0.366     # 34.6 TFLOP/s at 2048
attention_backward_half_sequence = 572

[host]
h2d_gb_per_s = 4.4         # 4.1 GiB/s a GPU, all eight at once: Dazz993/Mist raw data
d2h_gb_per_s = 4.2         # 3.9 GiB/s
host_gb_per_s = 35         # eight times the above
memory_gb_per_s = 220      # as for p4d: the same generation of processors
memory_gib = 384           # of a node of eight: Google Cloud g2-standard-96, machine types
copy_us = 10               # assumed, as Calculon's link latency
file_read_gb_per_s = 3     # assumed: one NVMe drive
file_write_gb_per_s = 2
cores = 96                 # assumed

[intra]                    # PCIe; bench/fit_collectives.py, 8 GPUs, comm_l4.csv
alpha_us = 24
gb_per_s = 4.6
all_reduce_gb_per_s = 5.0

[inter]                    # 100 Gb/s a node
alpha_us = 24              # not better than within the node
gb_per_s = 11.5            # 0.92 of the line, the share that nccl-tests#290 reports for 400 Gb/s

[interference]
table = "l4"               # bench/fit_interference.py
)";

constexpr std::string_view kLocal = R"(
[device]
name = "this machine"      # a sketch of a two-core host; `interlace profile` measures the real one
kind = "cpu"
memory_gib = 16
tflops_half = 0.1          # torch.mm on one thread reached 94 to 103 GFLOP/s in fp32 (two-core host, torch 2.13)
tflops_single = 0.1
tflops_double = 0.05
memory_gb_per_s = 20       # copies of 16 MB and more on the same host
cache_mib = 16
cache_gb_per_s = 85        # torch.add and copies of 1 to 4 MB there
shortest_us = 0.7          # executor, tiny tensors: 0.6 to 0.8 an op
issue_us = 0               # the compute lane is the host

[kernels]
mm_efficiency = 0.95
mm_wave_exponent = 0
mm_half_k = 15             # 75, 97, 103 GFLOP/s at 64, 128, 256
mm_transposed_efficiency = 0.95
mm_transposed_wave_exponent = 0
mm_transposed_half_k = 15
memory_efficiency = 0.9
attention_efficiency = 0.5 # assumed
attention_half_sequence = 0
attention_backward_efficiency = 0.4
attention_backward_half_sequence = 0

[host]
h2d_gb_per_s = 10          # a copy in memory
d2h_gb_per_s = 10
host_gb_per_s = 20
memory_gb_per_s = 20
copy_us = 2
file_read_gb_per_s = 1     # assumed
file_write_gb_per_s = 0.5
cores = 2
tier = "file"              # what leaves memory goes to a file; "memory": copies at the rates above
compute_threads = 1
comm_core_us_per_mb = 700  # loopback, 4 ranks, 15 MB each way in 15.2 ms on two cores

[intra]
alpha_us = 30              # a gather of 1 KB over loopback sockets takes 20 to 90 us; a profile replaces it
gb_per_s = 1.0             # loopback, 4 ranks: 15 MB in 15.2 ms
coalesce = true            # the sockets take all units of a call at once

[inter]
alpha_us = 100
gb_per_s = 0.06            # 500 Mbit/s: 2.5 MB in 42.1 ms

[interference]
table = "none"             # cores are shared instead
)";

constexpr Preset kPresets[] = {
    {"h100-80gb", 8, kH100}, {"a100-40gb", 8, kA100}, {"l4-24gb", 8, kL4}, {"local", 0, kLocal}};

}  // namespace

std::vector<std::string_view> PresetNames() {
  std::vector<std::string_view> names;
  for (const Preset& p : kPresets) names.push_back(p.name);
  return names;
}

Result<std::string> PresetCluster(std::string_view name) {
  std::string_view base = name;
  int64_t count = 0;
  size_t dash = name.rfind('-');
  if (dash != std::string_view::npos) {
    const char* end = name.data() + name.size();
    auto [stop, error] = std::from_chars(name.data() + dash + 1, end, count);
    if (error == std::errc() && stop == end) {
      base = name.substr(0, dash);
    } else {
      count = 0;
    }
  }
  for (const Preset& p : kPresets) {
    if (p.name != base) continue;
    if (base.size() == name.size()) {
      return MakeError("the preset '", base, "' needs a number of devices, for example '", base, "-8'");
    }
    if (count < 1 || count > 1 << 20)
      return MakeError("the number of devices in '", name, "' must be from 1 to 1048576");
    int64_t per_node = p.per_node == 0 || count < p.per_node ? count : p.per_node;
    if (count % per_node != 0) {
      return MakeError("'", name, "' does not fill nodes of ", per_node, " devices; take a multiple of ", per_node);
    }
    return "name = \"" + std::string(name) + "\"\ndevices = " + std::to_string(count) +
           "\nper_node = " + std::to_string(per_node) + "\n" + std::string(p.text);
  }
  std::string list;
  for (const Preset& p : kPresets) list += (list.empty() ? "" : ", ") + std::string(p.name) + "-N";
  std::string hint = DidYouMean(base, PresetNames());
  return MakeError("there is no cluster file or preset '", name, "'", hint, hint.empty() ? "; " : " ",
                   "presets: ", list);
}

}  // namespace interlace
