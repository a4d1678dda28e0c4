// What torch asks of a device: guard, hooks, generator; and the Python module.
#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>

#include "engine.h"
#include "generator.h"
#include "memory.h"

namespace soft {

void BindGroup(pybind11::module& m);
void BindPace(pybind11::module_& m);

namespace {

using c10::Device;
using c10::DeviceIndex;
const Device kDevice(c10::kPrivateUse1, 0);

bool streams = true;  // false: a device without them
void CheckStreams() {
  TORCH_CHECK_NOT_IMPLEMENTED(streams, "Backend doesn't support streams and events.");
  Engine::Get().CheckHere();
}

c10::Stream Wrap(int stream) { return c10::Stream(c10::Stream::UNSAFE, kDevice, stream); }
int Unwrap(const c10::Stream& s) { return static_cast<int>(s.id()); }
EventPtr& Unwrap(void* event) { return *static_cast<EventPtr*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  explicit Guard(c10::DeviceType) {}
  Guard() = default;
  static constexpr c10::DeviceType static_type = c10::kPrivateUse1;
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::Stream getStream(Device) const noexcept override { return Wrap(CurrentStream()); }
  c10::Stream getDefaultStream(Device) const override { return Wrap(0); }
  c10::Stream getNewStream(Device, int) const override {
    CheckStreams();
    return Wrap(Engine::Get().NewStream());
  }
  c10::Stream getStreamFromGlobalPool(Device, bool) const override { return getNewStream(kDevice, 0); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return Wrap(ExchangeStream(Unwrap(s))); }
  void* getStreamNativeHandle(const c10::Stream s) const override { return reinterpret_cast<void*>(s.id()); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<EventPtr*>(event); }
  void record(void** event, const c10::Stream& s, DeviceIndex, c10::EventFlag) const override {
    CheckStreams();
    const OwnTime own;
    if (!*event) *event = new EventPtr(std::make_shared<Event>());
    Engine::Get().Record(Unwrap(*event), Unwrap(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    CheckStreams();
    const OwnTime own;
    if (event) Engine::Get().Block(Unwrap(event), Unwrap(s));
  }
  bool queryEvent(void* event) const override { return !event || Engine::Get().Query(Unwrap(event)); }
  void synchronizeEvent(void* event) const override {
    CheckStreams();
    if (event) Engine::Get().Synchronize(Unwrap(event));
  }
  bool queryStream(const c10::Stream& s) const override { return Engine::Get().QueryStream(Unwrap(s)); }
  void synchronizeStream(const c10::Stream& s) const override {
    Engine::Get().CheckHere();
    Engine::Get().Synchronize(Unwrap(s));
  }
  void synchronizeDevice(DeviceIndex) const override {
    Engine::Get().CheckHere();
    Engine::Get().SynchronizeAll();
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    c10::getDeviceAllocator(c10::kPrivateUse1)->recordStream(p, s);
  }
  double elapsedTime(void* a, void* b, DeviceIndex) const override {
    TORCH_CHECK(a && b, "both events must be recorded");
    TORCH_CHECK(Engine::Get().Query(Unwrap(a)) && Engine::Get().Query(Unwrap(b)), "both events must be over");
    return Unwrap(b)->ms - Unwrap(a)->ms;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

const at::Generator& DefaultGenerator() {
  static at::Generator* generator = new at::Generator(at::make_generator<Generator>());
  return *generator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return DefaultGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<Generator>(); }
  Device getDeviceFromPtr(void* p) const override {
    TORCH_CHECK(OnDevice(p), "no address of the soft device");
    return kDevice;
  }
  bool isPinnedPtr(const void* p) const override { return PinnedBlockOf(p).at != nullptr; }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(at::kPrivateUse1); }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    auto* storage = s.unsafeGetStorageImpl();
    c10::DataPtr fresh = storage->allocator()->allocate(n);
    const size_t keep = std::min(n, storage->nbytes());
    if (keep > 0) storage->allocator()->copy_data(fresh.get(), storage->data(), keep);
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(n);
  }
};

struct Registered {
  Registered() { at::RegisterPrivateUse1HooksInterface(new Hooks); }
} registered;

}  // namespace

Generator::Generator() : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  at::Tensor state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(c10::kCPU));
  std::memcpy(state.mutable_data_ptr(), &seed_, 8);
  std::memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &offset_, 8);
  return state.getIntrusivePtr();
}
void Generator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK(state.numel() == 16, "a state of the soft device's generator has 16 bytes");
  std::memcpy(&seed_, state.data(), 8);
  std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
}

// For what stands in for CUDA's driver (cuda_driver.cc), a library of its own: an op of a stream, which may run many times
// where it is captured, and where bytes lie.
extern "C" __attribute__((visibility("default"))) void soft_enqueue(int stream, const char* name, const Access* touched,
                                                                   size_t count, void (*run)(void*),
                                                                   void (*drop)(void*), void* data) {
  Engine::Get().Enqueue(stream, name, {touched, touched + count}, [run, held = std::shared_ptr<void>(data, drop)] {
    run(held.get());
    return true;
  });
}
extern "C" __attribute__((visibility("default"))) void* soft_real(const void* p) {
  return OnDevice(p) ? Real(p) : nullptr;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  const py::call_guard<py::gil_scoped_release> released;
  m.def("init", [] { at::globalContext().lazyInitDevice(c10::kPrivateUse1); });
  m.def("default_generator", [] {
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(DefaultGenerator()));
  });
  m.def("set_mode", [](const std::string& name, uint64_t seed, double run) { Engine::Get().SetMode({name, seed, run}); },
        py::arg("name"), py::arg("seed") = 0, py::arg("run") = 0.3, released);
  m.def("set_checker", [](bool on) { Engine::Get().SetChecker(on); });
  m.def("set_capacity", &SetCapacity, "Bytes of device memory.");
  m.def("release_idle", &ReleaseIdle, released);
  m.def("stop", [] { Engine::Get().Stop(); }, released);
  m.def("fail", [](const std::string& text) { Engine::Get().Fail(text); });
  m.def("lose", [](const std::string& text, int64_t after) { Engine::Get().Lose(text, after); },
        "After so many more ops all calls fail; with an empty text they work again.");
  m.def("set_streams", [](bool on) { streams = on; }, "Whether it is a device that has streams and events.");
  m.def("own_seconds", &OwnTime::seconds, "Time that this thread has spent in the device's own code.");
  m.def("executed", [] { return Engine::Get().executed(); });
  m.def("issued", [] { return Engine::Get().issued(); }, "Ops, records and waits that the host has given; a replay is one.");
  m.def("waits", [] { return Engine::Get().waits(); }, "How often the host has waited for something.");
  m.def("count", [] { return Engine::Get().reports() + HostTouches(); }, "Reports of the order checker so far.");
  m.def("reports", [] { return Engine::Get().TakeReports(); });
  m.def("host_touches", &HostTouches, "Accesses of the host to pinned memory whose copy it had not waited for.");
  BindGroup(m);
  BindPace(m);
}

}  // namespace soft
