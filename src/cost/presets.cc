// The presets as cluster files. A number without its own comment is from the line above it that has one.
#include <algorithm>

#include "base/check.h"
#include "base/scan.h"
#include "base/suggest.h"
#include "cost/cluster.h"

namespace interlace {
namespace {

struct Preset {
  std::string_view name;
  int64_t per_node;  // 0: all devices on one host
  std::string_view text;
  std::string_view changes = {}, more = {};  // "table key = value  # source", a line each: what is not as in the text
};

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
attention_head_64 = 0.87   # forward and backward, causal, 4k: 257 of 294 TFLOP/s: flash-attention 0251105  (H100)
[step.eager]               # bench/fit_presets.py on mosaicml_7b.csv: MPT-7B, FSDP; 0.8 %, left out by length 0.8 %
products = 0.79
attention = 0.64
issue_us = 8.0             # assumed
issue_backward = 0.48      # of that in backward, which autograd launches from C++: as A100's [step.megatron]
error = 0.06               # bench/fit_presets.py: 6 groups left out; the least for constants of one model
[step.compiled]            # products 10 % nearer to their kernels, elementwise chains once through memory: assumed
products = 0.87
attention = 0.7
memory = 1.5
issue_us = 4.0             # assumed
error = 0.12               # assumed
[step.megatron]            # bench/fit_presets.py on vtrain_single_fit.csv, 240 runs: error 5.8 %
products = 0.84
attention = 0.64           # as [step.eager]
memory = 0.61
issue_us = 118             # of a kernel, with what Megatron's Python does between two
issue_backward = 0.36      # of that in backward, which autograd launches from C++
error = 0.083              # runs left out in turn by model, 8 groups

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

[step.kernels]
error = 0.035              # bench/prediction.py, with a profile: 2.5 % mean over 53 configurations
)";

// What is not changed below is the other device's, measured or not, and so assumed here.
constexpr std::string_view kH100 = R"(
device name = "H100 SXM5 80GB"
device memory_gib = 80
device processors = 132          # data sheet, as are the peaks
device tflops_half = 989.5
device tflops_single = 67
device tflops_double = 67
device memory_gb_per_s = 3350    # data sheet
device cache_mib = 50
device cache_gb_per_s = 5500     # assumed: 1.6 times the memory's; no public table at hand
kernels mm_efficiency = 0.828    # bench/fit_kernels.py, rows of zzc0721/torch-performance-test-data#79 and vLLM#17126
kernels mm_wave_exponent = 0.64
kernels mm_half_k = 114
kernels mm_transposed_efficiency = 0.828 # the public rows do not tell them apart
kernels mm_transposed_wave_exponent = 0.64
kernels mm_transposed_half_k = 114
kernels memory_efficiency = 0.79 # gather and scatter kernels reach 0.76 to 0.83: FBGEMM#3993
kernels attention_efficiency = 0.352 # bench/fit_kernels.py: FlashAttention-2, causal, head 128, flash-attention 0251105
kernels attention_backward_efficiency = 0.328
step.eager products = 0.76       # bench/fit_presets.py on mosaicml_7b.csv: MPT-7B, FSDP; 1.4 %, left out by length 1.4 %
step.eager attention = 0.55
step.compiled products = 0.84    # products 10 % nearer to their kernels, elementwise chains once through memory: assumed
step.compiled attention = 0.61
step.megatron products = 0.76    # as [step.eager]; the rest as on A100
step.megatron attention = 0.55
step.megatron error = 0.15       # assumed
host h2d_gb_per_s = 55.4         # nvbandwidth, Gen5 x16, pinned: stas00/ml-engineering
host d2h_gb_per_s = 55.1
host host_gb_per_s = 440         # the same source: all eight links at once reach the rate of one
host memory_gb_per_s = 320       # 0.78 of 2 sockets of 8 DDR4-3200 channels (AWS p5); STREAM's share as below
host memory_gib = 2048           # of a node of eight: AWS p5.48xlarge, instance types
host cores = 96                  # assumed
intra alpha_us = 3.0             # all-reduce of 1 MiB at 39.9 GB/s over 8 GPUs: stas00/ml-engineering 744d01e
intra gb_per_s = 361.4           # all-gather of 16 GiB: the same source
intra all_reduce_gb_per_s = 367  # ring of 16 GiB: the same source
intra tree_gb_per_s = 482        # NVLink SHARP: bench/fit_collectives.py on the same source's table of 1 MiB to 4 GiB, error 1.1 %
intra tree_half_mib = 19.3
intra tree_power = 0.81
intra error = 0.1                # assumed
inter gb_per_s = 319             # 8 x 400 Gb/s a node
inter tree_gb_per_s = 376        # bench/fit_collectives.py on nccl_p5_all_reduce, 16 to 128 GPUs: error 6.0 %
inter tree_pair_gb_per_s = 505
inter tree_half_mib = 65
inter tree_spread = 0.5
inter tree_power = 0.71
inter error = 0.11               # 32, 64 and 128 GPUs left out in turn: 8.7, 7.2 and 10.2 %
)";

constexpr std::string_view kL4 = R"(
device name = "L4 24GB"
device memory_gib = 24
device reserve_gib = 2           # accelerator context and NCCL over PCIe: assumed
device processors = 58           # data sheet, as are the peaks
device tflops_half = 121
device tflops_single = 30.3
device tflops_double = 0.47
device memory_gb_per_s = 300     # data sheet
device cache_mib = 48
device cache_gb_per_s = 950      # torch add of 50 MB in 52.7 us: op_times_l4.csv
device shortest_us = 2.2         # op_times_l4.csv: empty ops take 2.2 to 2.5
kernels mm_efficiency = 0.484    # bench/fit_kernels.py on op_times_l4.csv at 1050 MHz, what 72 W allow for long: error 2.4 %
kernels mm_wave_exponent = 0.47
kernels mm_half_k = 138
kernels mm_transposed_efficiency = 0.484
kernels mm_transposed_wave_exponent = 0.47
kernels mm_transposed_half_k = 138
kernels memory_efficiency = 0.77 # gelu 0.770, dropout 0.773
kernels attention_efficiency = 0.409  # 41.8 TFLOP/s at sequence 2048: op_times_l4.csv at 1050 MHz (63.9 unlocked)
kernels attention_backward_efficiency = 0.339  # 32.1 (34.6 unlocked)
step.eager products = 0.95       # assumed: no whole steps at hand, and the kernels' clocks are those of steps
step.eager attention = 0.95
step.eager error = 0.15
step.compiled products = 1
step.compiled attention = 1
step.megatron products = 0.95
step.megatron attention = 0.95
step.megatron memory = 1         # gelu reaches 240 GB/s in op_times_l4.csv, as alone
step.megatron error = 0.15       # assumed
host h2d_gb_per_s = 4.4          # 4.1 GiB/s a GPU, all eight at once: Dazz993/Mist raw data
host d2h_gb_per_s = 4.2          # 3.9 GiB/s
host host_gb_per_s = 35          # eight times the above
host memory_gib = 384            # of a node of eight: Google Cloud g2-standard-96, machine types
host cores = 96                  # assumed
intra alpha_us = 24              # PCIe; bench/fit_collectives.py, 8 GPUs, comm_l4.csv
intra gb_per_s = 4.6
intra all_reduce_gb_per_s = 5.0
inter alpha_us = 24              # not better than within the node
inter gb_per_s = 11.5            # 0.92 of the line, the share that nccl-tests#290 reports for 400 Gb/s
interference table = "l4"        # bench/fit_interference.py
)";

constexpr std::string_view kA100Large = R"(
device name = "A100 SXM4 80GB"
device memory_gib = 80           # data sheet
device memory_gb_per_s = 2039    # data sheet
step.eager products = 0.88       # bench/fit_presets.py on mosaicml_7b.csv: MPT-7B, FSDP; 1.2 %, left out by length 1.7 %
step.compiled products = 0.97
inter gb_per_s = 184             # 1600 Gb/s a node, of which 0.92 as nccl-tests#290 reports for one card
)";

constexpr std::string_view kA10G = R"(
device name = "A10G 24GB"        # whole steps: L4's, assumed
device processors = 80           # data sheet, as are the peaks but for half
device tflops_half = 70          # op_times_gpt_a10g.csv: 69.1 at most
device tflops_single = 31.2
device tflops_double = 0.49
device memory_gb_per_s = 600     # data sheet
device cache_mib = 6
device cache_gb_per_s = 1900     # assumed, as L4's share
kernels mm_efficiency = 0.986    # bench/fit_kernels.py, op_times_gpt_a10g.csv, 144 forward rows: error 2.2 %
kernels mm_wave_exponent = 0.56
kernels mm_half_k = 152
kernels mm_transposed_efficiency = 0.986
kernels mm_transposed_wave_exponent = 0.56
kernels mm_transposed_half_k = 152
kernels memory_efficiency = 0.77 # dropout 0.797, gelu 0.750
kernels attention_efficiency = 0.62          # L4's without locked clocks
kernels attention_backward_efficiency = 0.366
host memory_gib = 768            # of a node of eight: AWS g5.48xlarge, instance types
intra alpha_us = 19              # bench/fit_collectives.py, 8 GPUs, comm_a10g.csv
intra gb_per_s = 1.56
intra all_reduce_gb_per_s = 1.94
)";

constexpr std::string_view kH200 = R"(
device name = "H200 SXM5 141GB"  # kernels, links and whole steps are H100's
device memory_gib = 141          # data sheet
device memory_gb_per_s = 4800    # data sheet
device cache_gb_per_s = 7700     # assumed, 1.6 times the memory's
)";

constexpr std::string_view kB200 = R"(
device name = "B200 SXM 180GB"   # whole steps: H100's, assumed
device memory_gib = 180          # data sheet of HGX B200
device processors = 148          # data sheet, as are the peaks
device tflops_half = 2250
device tflops_single = 75
device tflops_double = 37
device memory_gb_per_s = 7700    # data sheet
device cache_mib = 126
device cache_gb_per_s = 12300    # assumed, 1.6 times the memory's
kernels mm_efficiency = 0.78     # assumed: pytorch/ao's rule for any device
kernels mm_transposed_efficiency = 0.78
kernels attention_efficiency = 0.30      # assumed: products doubled, exponentials did not
kernels attention_backward_efficiency = 0.28
intra gb_per_s = 723             # data sheet: twice NVLink 4, at the share that H200 reaches
intra all_reduce_gb_per_s = 734
intra tree_gb_per_s = 964
)";

constexpr std::string_view kMI300X = R"(
device name = "MI300X 192GB"     # whole steps: H100's, assumed
device memory_gib = 192          # data sheet
device processors = 304          # data sheet, as are the peaks
device tflops_half = 1307
device tflops_single = 163
device tflops_double = 82
device memory_gb_per_s = 5300    # data sheet
device cache_mib = 256
device cache_gb_per_s = 11900    # assumed: 0.7 of the data sheet's 17200
device shortest_us = 5           # assumed
kernels mm_efficiency = 0.55     # assumed: the clock falls under load
kernels mm_transposed_efficiency = 0.55
kernels attention_efficiency = 0.25      # assumed
kernels attention_backward_efficiency = 0.2
intra alpha_us = 5               # assumed
intra gb_per_s = 310             # 7 links of 64 GB/s a direction: data sheet, 0.69 assumed
intra all_reduce_gb_per_s = 310
intra tree_gb_per_s = 310        # there is no sum in switches
intra error = 0.3
)";

constexpr Preset kPresets[] = {{"h100-80gb", 8, kA100, kH100},
                               {"h200-141gb", 8, kA100, kH100, kH200},
                               {"b200-180gb", 8, kA100, kH100, kB200},
                               {"mi300x-192gb", 8, kA100, kH100, kMI300X},
                               {"a100-80gb", 8, kA100, kA100Large},
                               {"a100-40gb", 8, kA100},
                               {"a10g-24gb", 8, kA100, kL4, kA10G},
                               {"l4-24gb", 8, kA100, kL4},
                               {"local", 0, kLocal}};

// The text with the changes, each in its table, in place of the line that has the key there.
std::string Changed(const Preset& preset) {
  std::string text(preset.text);
  const std::string all = std::string(preset.changes) + std::string(preset.more);
  std::string_view changes = all;
  while (!changes.empty()) {
    const std::string_view line = changes.substr(0, changes.find('\n'));
    changes.remove_prefix(std::min(changes.size(), line.size() + 1));
    const size_t blank = line.find(' ');
    if (blank == std::string_view::npos) continue;
    const std::string key(line.substr(blank + 1, line.find(' ', blank + 1) - blank));
    const size_t table = text.find("\n[" + std::string(line.substr(0, blank)) + "]");
    CHECK(table != std::string::npos) << "no table for " << std::string(line);
    size_t begin = text.find("\n" + key, table);
    const size_t next = text.find("\n[", table + 1);
    if (begin == std::string::npos || begin > next)
      begin = text.find('\n', table + 1);  // a new one, first of its table
    const bool replaces = text.compare(begin + 1, key.size(), key) == 0;
    const size_t end = replaces ? text.find('\n', begin + 1) : begin;
    text.replace(begin, end - begin, "\n" + std::string(line.substr(blank + 1)));
  }
  return text;
}

// [step.ours] and [step.graph]: this runtime's regions come as near to their kernels as compiled ones, and what they
// move is counted region by region; PyTorch's graphs have the kernels of [step.eager].
void AddStacks(std::string& text) {
  const size_t begin = text.find("\n[step.eager]");
  if (begin == std::string::npos) return;
  const auto shares = [&](std::string_view stack, std::initializer_list<std::string_view> keys) {
    const size_t at = text.find("\n[step." + std::string(stack) + "]");
    std::string out;
    for (std::string_view line :
         Split(std::string_view(text).substr(at + 1, text.find("\n[", at + 1) - at - 1), '\n')) {
      if (std::any_of(keys.begin(), keys.end(), [&](std::string_view key) { return line.starts_with(key); }))
        out += "\n" + std::string(line);
    }
    return out;
  };
  text.insert(begin, "\n[step.graph]  # kernels as [step.eager]\nissue_us = 0.5  # assumed" +
                         shares("eager", {"products", "attention", "memory", "error"}) +
                         "\n[step.ours]  # products and attention as [step.compiled]\nissue_us = 2.0  # assumed" +
                         shares("compiled", {"products", "attention"}) +
                         "\nerror = 0.09  # three steps measured on an H100: +4, +8 and -9 %");
}

}  // namespace

std::vector<std::string_view> PresetNames() {
  std::vector<std::string_view> names;
  for (const Preset& p : kPresets) names.push_back(p.name);
  return names;
}

Result<std::string> PresetCluster(std::string_view whole) {
  const size_t colon = whole.find(':');
  const std::string_view name = whole.substr(0, colon);
  const std::string_view stack = colon == std::string_view::npos ? std::string_view() : whole.substr(colon + 1);
  if (colon != std::string_view::npos && std::find(kStacks.begin(), kStacks.end(), stack) == kStacks.end()) {
    return MakeError("'", whole, "' is of no software stack that is known",
                     DidYouMean(stack, {kStacks.begin(), kStacks.end()}),
                     "; stacks: kernels, ours, eager, compiled, graph, megatron");
  }
  std::string_view base = name;
  int64_t count = 0;
  const size_t dash = name.rfind('-');
  if (const auto number = ParseNumber<int64_t>(dash == std::string_view::npos ? "" : name.substr(dash + 1))) {
    base = name.substr(0, dash);
    count = *number;
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
    std::string text = Changed(p);
    AddStacks(text);
    std::string said = stack.empty() ? "" : "stack = \"" + std::string(stack) + "\"\n";
    return "name = \"" + std::string(whole) + "\"\ndevices = " + std::to_string(count) +
           "\nper_node = " + std::to_string(per_node) + "\n" + said + text;
  }
  std::string list;
  for (const Preset& p : kPresets) list += (list.empty() ? "" : ", ") + std::string(p.name) + "-N";
  std::string hint = DidYouMean(base, PresetNames());
  return MakeError("there is no cluster file or preset '", name, "'", hint, hint.empty() ? "; " : " ",
                   "presets: ", list);
}

}  // namespace interlace
