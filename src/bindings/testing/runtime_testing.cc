// runtime_testing.cc — _runtime.testing: kernels one by one, the page heap, and a count of memory, for tests and
// benchmarks. Only in builds with INTERLACE_TESTING: what pip installs does not have it.
#include <ATen/ops/empty.h>

#include <memory>
#include <optional>

#include "bindings/runtime.h"
#include "ir/rule_loop.h"
#include "ir/text.h"
#include "runtime/allocator.h"
#include "runtime/attention_ops.h"
#include "runtime/file_operators.h"
#include "runtime/kernels_aten.h"
#include "runtime/rule_loops.h"
#include "runtime/step_heap.h"
#include "runtime/view.h"
#include "transport/frame_sum.h"

namespace py = pybind11;

namespace interlace {

namespace {

at::Tensor OrUndefined(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

at::Tensor PageHeapBlock(int64_t bytes) {
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, StepHeap::Allocate(bytes), nullptr,
                             /*resizable=*/false);
  return at::empty({0}, at::kByte).set_(storage, 0, {bytes}, {1});
}

}  // namespace

// Called by the module's own initialization (runtime.cc).
void BindTesting(py::module_& module) {
  py::module_ m = module.def_submodule("testing", "Kernels of the runtime one by one, for tests and benchmarks.");
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def("leave_out_frame_sums", &FrameSum::LeaveOut, py::arg("out"));
  m.def("file_operators", &FileOperators, "The operators that programs from files may use.");
  m.def("attention", &Attention, no_gil);
  m.def("attention_backward", &AttentionBackward, no_gil);
  // `with testing.CountMemory() as memory: ...; memory.peak_bytes`: bytes of CPU tensors that this thread allocates,
  // any library's.
  struct CountMemory {
    std::unique_ptr<MemoryScope> scope;
    MemoryUse use;
  };
  py::class_<CountMemory>(m, "CountMemory")
      .def(py::init([] {
        InstallCountingAllocator();
        return CountMemory{};
      }))
      .def(
          "__enter__",
          [](CountMemory& c) -> CountMemory& {
            c.scope = std::make_unique<MemoryScope>();
            return c;
          },
          py::return_value_policy::reference)
      .def("__exit__",
           [](CountMemory& c, const py::args&) {
             c.use = MemoryScope::Use();
             c.scope.reset();
           })
      .def_property_readonly("live_bytes", [](const CountMemory& c) { return c.use.live_bytes; })
      .def_property_readonly("peak_bytes", [](const CountMemory& c) { return c.use.peak_bytes; });

  m.def(
      "adam_step",
      [](const at::Tensor& w, const at::Tensor& g, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, double lr,
         double beta1, double beta2, double eps, double weight_decay, double t, bool maximize, bool decoupled,
         double grad_scale, bool aten, bool consume) {
        const AdamArgs args{lr, beta1, beta2, eps, weight_decay, t, maximize, decoupled, grad_scale};
        aten ? AdamStepAten({{w}, {g}, {exp_avg}, {exp_avg_sq}}, args, consume) : AdamStep(w, g, exp_avg, exp_avg_sq, args);
      },
      py::arg("w"), py::arg("g"), py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("lr") = 1e-3,
      py::arg("beta1") = 0.9, py::arg("beta2") = 0.999, py::arg("eps") = 1e-8, py::arg("weight_decay") = 0.0,
      py::arg("t") = 1.0, py::arg("maximize") = false, py::arg("decoupled") = true, py::arg("grad_scale") = 1.0,
      py::arg("aten") = false, py::arg("consume") = false, no_gil);
  m.def(
      "sgd_step",
      [](const at::Tensor& w, const at::Tensor& g, const std::optional<at::Tensor>& momentum_buffer, double lr,
         double momentum, double dampening, double weight_decay, double t, bool nesterov, bool maximize,
         double grad_scale, bool aten) {
        (aten ? SgdStepAten : SgdStep)(w, g, OrUndefined(momentum_buffer),
                                       {lr, momentum, dampening, weight_decay, t, nesterov, maximize, grad_scale});
      },
      py::arg("w"), py::arg("g"), py::arg("momentum_buffer") = py::none(), py::arg("lr") = 1e-3,
      py::arg("momentum") = 0.0, py::arg("dampening") = 0.0, py::arg("weight_decay") = 0.0, py::arg("t") = 1.0,
      py::arg("nesterov") = false, py::arg("maximize") = false, py::arg("grad_scale") = 1.0, py::arg("aten") = false,
      no_gil);
  m.def(
      "rule_step",
      [](const std::string& text, size_t form, const std::vector<at::Tensor>& flats, const std::vector<double>& numbers,
         double grad_scale, bool aten, bool compiled) {
        static std::string known;  // benchmarks call it with one text many times
        static UpdateRule rule;
        if (text != known) {
          Result<Program> program = Parse("interlace 1 captured\n" + text + "\n");
          if (!program.ok()) throw std::invalid_argument(program.error().ToString());
          rule = program->rules.at(0), known = text;
        }
        if (aten) return RuleStepAten(rule.forms.at(form), flats, numbers, grad_scale);
        RuleLoop loop = nullptr;
        if (compiled) {
          const int states = static_cast<int>(rule.states.size());
          loop = *PlaceOf(rule.forms.at(form), states, flats.at(0).scalar_type());
          if (loop == nullptr) throw std::invalid_argument("the form has no loop");
        }
        RuleStep(rule.forms.at(form), flats, numbers, grad_scale, loop);
      },
      py::arg("text"), py::arg("form"), py::arg("flats"), py::arg("numbers"), py::arg("grad_scale") = 1.0,
      py::arg("aten") = false, py::arg("compiled") = false, no_gil);
  m.def(
      "rule_loops",
      [](const std::vector<std::string>& texts, const std::vector<std::string>& dtypes) {
        std::vector<RuleLoopText> loops;
        for (const std::string& text : texts) {
          Result<Program> program = Parse("interlace 1 captured\n" + text + "\n");
          if (!program.ok()) throw std::invalid_argument(program.error().ToString());
          const UpdateRule& rule = program->rules.at(0);
          const int states = static_cast<int>(rule.states.size());
          for (const std::string& name : dtypes) {
            const DType dtype = ParseDType(name).value();
            for (const RuleForm& form : rule.forms) {
              PlaceOf(form, states, ScalarTypeOf(dtype));
              loops.push_back(LoopOf(form, states, dtype));
            }
          }
        }
        return FileOf(loops);
      },
      py::arg("texts"), py::arg("dtypes"), "The loops of rules' forms as C++; they have places from now on.");
  m.def(
      "norm_partial",
      [](const at::Tensor& flat, const at::Tensor& acc, bool aten) {
        (aten ? NormPartialAten : NormPartial)(flat, acc);
      },
      py::arg("flat"), py::arg("acc"), py::arg("aten") = false, no_gil);
  m.def("page_heap_block", &PageHeapBlock, py::arg("bytes"), "A byte tensor in the page heap, not filled.");
  m.def("page_heap_bytes", &StepHeap::Bytes);
  m.def(
      "current_op", [] { return reinterpret_cast<uintptr_t>(&MemoryScope::CurrentOp); },
      "The address of a function without arguments that gives the id of the op that this thread issues, or -1; for the "
      "software accelerator (tests/accelerator/pace.h).");
  m.def("norm_coef", &NormCoef, py::arg("acc"), py::arg("max_norm"), py::arg("scale"), py::arg("out"),
        py::arg("loss_scale") = 1.0, no_gil);
  m.def("embedding_backward_into", &EmbeddingBackwardInto, py::arg("grad"), py::arg("indices"), py::arg("num_weights"),
        py::arg("padding_idx"), py::arg("scale_grad_by_freq"), py::arg("out"), no_gil);
  m.def(
      "layer_norm_backward_into",
      [](const at::Tensor& grad, const at::Tensor& input, int64_t normalized_numel, const at::Tensor& mean,
         const at::Tensor& rstd, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& dx,
         const std::optional<at::Tensor>& dweight, const std::optional<at::Tensor>& dbias) {
        return LayerNormBackwardInto(grad, input, normalized_numel, mean, rstd, OrUndefined(weight), OrUndefined(dx),
                                     OrUndefined(dweight), OrUndefined(dbias));
      },
      py::arg("grad"), py::arg("input"), py::arg("normalized_numel"), py::arg("mean"), py::arg("rstd"),
      py::arg("weight"), py::arg("dx"), py::arg("dweight"), py::arg("dbias"), no_gil);
}

}  // namespace interlace
