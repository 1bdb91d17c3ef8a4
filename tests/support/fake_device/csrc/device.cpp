// What torch asks a device type for: the current device and stream, events, random numbers, autograd's thread.
#include "fake.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace fake {
namespace {

struct Event {
  Mark mark;
  bool has_time = false;
  std::shared_ptr<std::atomic<int64_t>> at;  // nanoseconds, when the device has reached it
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kType, static_cast<c10::DeviceIndex>(current_device())};
  }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() >= 0 && device.index() < device_count()) set_current_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.has_index() ? device.index() : current_device());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, device.has_index() ? device.index() : getDevice().index()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(device.has_index() ? device.index() : current_device());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(device.has_index() ? device.index() : current_device());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new Event();
    auto& recorded = *static_cast<Event*>(*event);
    Queue& queue = queue_of(stream);
    recorded.has_time = flag == c10::EventFlag::BACKEND_DEFAULT;
    if (recorded.has_time) {
      recorded.at = std::make_shared<std::atomic<int64_t>>(0);
      launch("event.record", queue, {}, [at = recorded.at] {
        at->store(std::chrono::duration_cast<std::chrono::nanoseconds>(
                      std::chrono::steady_clock::now().time_since_epoch()).count());
      });
    }
    recorded.mark = mark(queue);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) stream_waits(queue_of(stream), static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || has_passed(static_cast<Event*>(event)->mark);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  bool queryStream(const c10::Stream& stream) const override {
    return has_passed(mark(queue_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits("stream.synchronize", mark(queue_of(stream)));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) host_waits("event.synchronize", static_cast<Event*>(event)->mark);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    host_waits_for_device("synchronize", device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_stream(pointer, stream);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(start != nullptr && end != nullptr, "Both events must be recorded before calculating elapsed time.");
    auto& first = *static_cast<Event*>(start);
    auto& last = *static_cast<Event*>(end);
    TORCH_CHECK(first.has_time && last.has_time, "Both events must be created with argument 'enable_timing=True'.");
    TORCH_CHECK(
        has_passed(first.mark) && has_passed(last.mark),
        "Both events must be completed before calculating elapsed time. Call end.synchronize() first.");
    return static_cast<double>(last.at->load() - first.at->load()) * 1e-6;
  }
};

// As on CUDA the state is a seed and an offset, which each launch of a kernel that draws moves.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.numel() == 16 && state.device().is_cpu() && state.is_contiguous(),
        "the state of a generator of the fake accelerator has 16 bytes in host memory.");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t next() {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t mixed = seed_ + 0x9E3779B97F4A7C15ull * (offset_ / 4 + 1);
    offset_ += 4;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
    return mixed ^ (mixed >> 31);
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  // A state of the CPU's generator is a tensor of bytes too.
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 16, c10::GetAllocator(c10::DeviceType::CPU), false);
  auto* words = static_cast<uint64_t*>(storage->mutable_data());
  words[0] = seed_;
  words[1] = offset_;
  auto state = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<uint8_t>());
  state->set_sizes_contiguous({16});
  return state;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    if (device >= 0) set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return {kType, static_cast<c10::DeviceIndex>(current_device())};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static auto* all = new std::map<int, at::Generator>();
    static std::mutex mutex;
    int index = device < 0 ? current_device() : device;
    std::lock_guard<std::mutex> lock(mutex);
    auto found = all->find(index);
    if (found == all->end())
      found = all->emplace(index, at::make_generator<Generator>(static_cast<c10::DeviceIndex>(index))).first;
    return found->second;
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? static_cast<c10::DeviceIndex>(current_device()) : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage, size);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

uint64_t next_seed(void* generator) {
  auto* ours = static_cast<c10::GeneratorImpl*>(generator);
  return static_cast<Generator*>(ours)->next();
}

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

}  // namespace fake
