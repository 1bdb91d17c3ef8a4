// What Python sees.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/csrc/Generator.h>

#include "fake.h"

namespace py = pybind11;

namespace fake {
void bind_process_group(py::module_& module);
}

PYBIND11_MODULE(fake_device_c, module) {
  using namespace fake;
  register_allocator();
  register_hooks();
  module.def("device_count", device_count);
  module.def("current_device", current_device);
  module.def("set_device", set_current_device);
  module.def("synchronize", [](int device) { host_waits_for_device("synchronize", device); });
  module.def("host_waits", [] {
    Lock lock(runtime().mutex);
    return runtime().host_waits;
  });
  module.def("forget_host_waits", [] {
    Lock lock(runtime().mutex);
    runtime().host_waits.clear();
  });
  module.def("launches", [] {
    Lock lock(runtime().mutex);
    return runtime().launches;
  });
  module.def("queued", [] {
    Lock lock(runtime().mutex);
    uint64_t queued = 0;
    for (Queue* queue : runtime().queues)
      if (queue->runner != runtime().only_runner || queue == runtime().queues.front())
        queued += queue->runner->launched - queue->runner->done;
    return queued;
  });
  module.def("take_errors", [] {
    Lock lock(runtime().mutex);
    std::vector<std::string> errors;
    errors.swap(runtime().errors);
    return errors;
  });
  module.def("memory_use", [](int device) {
    Lock lock(runtime().mutex);
    const MemoryUse& use = memory_use(device);
    return py::make_tuple(use.allocated, use.peak, use.reserved, use.peak_reserved);
  });
  module.def("reset_peak", [](int device) {
    Lock lock(runtime().mutex);
    MemoryUse& use = memory_use(device);
    use.peak = use.allocated;
    use.peak_reserved = use.reserved;
  });
  module.def("default_generator", [](int device) {
    const auto& generator = at::detail::getPrivateUse1Hooks().getDefaultGenerator(static_cast<c10::DeviceIndex>(device));
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(generator));
  });
  module.def("empty_cache", empty_cache);
  module.def("is_in_bad_fork", [] { return runtime().forked; });
  module.def("stop", stop);
  bind_process_group(module);
}
