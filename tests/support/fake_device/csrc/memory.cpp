// Memory that the host may not touch, and pinned memory.
//
// One file in memory is mapped twice: tensors have addresses of a mapping without rights, kernels use the other one.
// A freed block is filled with not-a-numbers in the order of its stream, and is given at once to the next tensor of
// its size on that stream, as CUDA's caching allocator does.
#include "fake.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

namespace fake {
namespace {

constexpr size_t kSpace = size_t(1) << 40;  // addresses; pages are made when they are touched
constexpr size_t kGrain = 512;
constexpr size_t kPage = 4096;
constexpr uint64_t kMostUnused = uint64_t(1) << 31;

struct Freed {
  Block* block;
  std::vector<Mark> marks;
};

struct Unsettled {
  Block* block;
  Place freed_at;
};

struct Memory {
  int file = -1;
  char* host = nullptr;
  char* device = nullptr;
  size_t next = 0;
  std::map<std::pair<Queue*, size_t>, std::vector<Block*>> free;
  // Freed while another stream may use it: an error, unless its own stream waits before it allocates again.
  std::map<Queue*, std::vector<Unsettled>> unsettled;
  std::vector<Freed> pending;  // freed, and a stream that was recorded may still use it
  std::map<int, MemoryUse> use;
  std::map<char*, Block*> blocks;  // by their address
};
Memory& memory() {
  static auto* all = new Memory();
  return *all;
}

struct sigaction before;

void on_fault(int number, siginfo_t* info, void* context) {
  auto* address = static_cast<char*>(info->si_addr);
  Memory& all = memory();
  if (address >= all.host && address < all.host + kSpace) {
    const char* message = "fake accelerator: the host touched memory of the device. Copy the tensor to the CPU first.\n";
    ssize_t ignored = write(STDERR_FILENO, message, strlen(message));
    (void)ignored;
  }
  // The instruction runs again, and faults in Python's handler, which prints the stack.
  sigaction(number, &before, nullptr);
}

void map_once() {
  Memory& all = memory();
  if (all.host != nullptr) return;
  all.file = memfd_create("fake-device", MFD_CLOEXEC);
  TORCH_CHECK(all.file >= 0 && ftruncate(all.file, static_cast<off_t>(kSpace)) == 0, "memfd_create failed: ", strerror(errno));
  void* host = mmap(nullptr, kSpace, PROT_NONE, MAP_SHARED | MAP_NORESERVE, all.file, 0);
  void* device = mmap(nullptr, kSpace, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, all.file, 0);
  TORCH_CHECK(host != MAP_FAILED && device != MAP_FAILED, "mmap failed: ", strerror(errno));
  all.host = static_cast<char*>(host);
  all.device = static_cast<char*>(device);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &before);
  pthread_atfork(nullptr, nullptr, [] { runtime().forked = true; });
}

void fill_locked(Lock& lock, Block* block, const char* call) {
  void* address = memory().device + (block->address - memory().host);
  size_t size = block->size;
  launch_locked(lock, *block->owner, {-1, 0, call}, [address, size] { std::memset(address, 0xFF, size); });
}

void give_back_locked(Lock& lock, Block* block) {
  block->uses.clear();
  block->recorded.clear();
  memory().free[{block->owner, block->size}].push_back(block);
  fill_locked(lock, block, "free");
}

// Gives back what was freed, and what the recorded streams have left.
void collect_locked(Lock& lock) {
  auto& pending = memory().pending;
  std::vector<Block*> ready;
  for (size_t i = 0; i < pending.size();) {
    bool is_done = true;
    for (const Mark& mark : pending[i].marks) is_done &= mark.runner->done >= mark.position;
    if (is_done) {
      ready.push_back(pending[i].block);
      pending.erase(pending.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      i++;
    }
  }
  for (Block* block : ready) give_back_locked(lock, block);
}

void release_locked(Lock& lock, int device) {
  for (Queue* queue : runtime().queues)
    if (queue->stream.device_index() == device) run_until(lock, mark_locked(*queue));
  collect_locked(lock);
  for (Queue* queue : runtime().queues)
    if (queue->stream.device_index() == device) run_until(lock, mark_locked(*queue));
  Memory& all = memory();
  for (auto& [key, blocks] : all.free) {
    if (key.first->stream.device_index() != device) continue;
    for (Block* block : blocks) {
      size_t offset = static_cast<size_t>(block->address - all.host);
      size_t begin = (offset + kPage - 1) / kPage * kPage, end = (offset + block->size) / kPage * kPage;
      if (end > begin)
        fallocate(
            all.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
            static_cast<off_t>(end - begin));
      all.use[device].reserved -= block->size;
      all.blocks.erase(block->address);
      delete block;
    }
    blocks.clear();
  }
}

void settle_locked(Lock& lock, Block* block) {
  Freed freed{block, {}};
  for (Queue* queue : block->recorded) freed.marks.push_back(mark_locked(*queue));
  if (freed.marks.empty()) {
    give_back_locked(lock, block);
  } else {
    memory().pending.push_back(std::move(freed));
  }
}

// Looks again at what was freed too early, before its stream allocates. Returns the sentence of an error, or nothing.
std::string settle_all_locked(Lock& lock, Queue& queue) {
  auto& unsettled = memory().unsettled[&queue];
  if (unsettled.empty()) return "";
  queue.clock.merge(runtime().host);
  std::string first;
  std::vector<Unsettled> all;
  all.swap(unsettled);
  for (const Unsettled& each : all) {
    std::string error = freed_too_early(*each.block, each.freed_at);
    if (first.empty()) first = error;
    settle_locked(lock, each.block);
  }
  return first;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  Runtime& all = runtime();
  if (all.stopping || all.forked) return;
  Place place = here("free", false);
  Lock lock(all.mutex);
  memory().use[block->device].allocated -= block->size;
  if (freed_too_early(*block, place).empty()) {
    settle_locked(lock, block);
  } else {
    memory().unsettled[block->owner].push_back({block, place});
  }
}

Block* take(int device, size_t size) {
  Queue& queue = current_queue(device);
  size_t rounded = (size + kGrain - 1) / kGrain * kGrain;
  Runtime& all = runtime();
  TORCH_CHECK(!all.forked, "the fake accelerator was used before this process was forked. Start the process otherwise.");
  Lock lock(all.mutex);
  raise_errors(lock);
  map_once();
  std::string error = settle_all_locked(lock, queue);
  if (!error.empty()) {
    lock.unlock();
    TORCH_CHECK(false, "fake accelerator: ", error);
  }
  collect_locked(lock);
  auto& found = memory().free[{&queue, rounded}];
  MemoryUse& use = memory().use[device];
  if (found.empty() && use.reserved > use.allocated + kMostUnused) release_locked(lock, device);
  Block* block;
  if (!found.empty()) {
    block = found.back();
    found.pop_back();
  } else {
    TORCH_CHECK(memory().next + rounded <= kSpace, "the fake accelerator has no addresses left.");
    block = new Block();
    block->address = memory().host + memory().next;
    memory().next += rounded;
    memory().blocks[block->address] = block;
    block->size = rounded;
    block->owner = &queue;
    block->device = device;
    use.reserved += rounded;
    use.peak_reserved = std::max(use.peak_reserved, use.reserved);
    fill_locked(lock, block, "empty");
  }
  block->wanted = size;
  use.allocated += rounded;
  use.peak = std::max(use.peak, use.allocated);
  return block;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    int device = current_device();
    c10::Device where(kType, static_cast<c10::DeviceIndex>(device));
    if (size == 0) return {nullptr, nullptr, &free_block_or_nothing, where};
    Block* block = take(device, size);
    return {block->address, block, &free_block_or_nothing, where};
  }
  static void free_block_or_nothing(void* context) {
    if (context != nullptr) free_block(context);
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    TORCH_CHECK(false, "the host cannot copy memory of the device.");
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    empty_cache();
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    record_stream(pointer, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    MemoryUse use = memory_use(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto set = [](c10::CachingAllocator::Stat& stat, uint64_t current, uint64_t peak) {
      stat.current = static_cast<int64_t>(current);
      stat.peak = static_cast<int64_t>(peak);
    };
    set(stats.allocated_bytes[0], use.allocated, use.peak);
    set(stats.reserved_bytes[0], use.reserved, use.peak_reserved);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    MemoryUse& use = memory_use(device);
    use.peak = use.allocated;
    use.peak_reserved = use.reserved;
  }
};

// Pinned memory: a block that is freed goes to the next tensor at once, unless a copy that was queued still needs it.
struct Pinned {
  size_t size = 0;
  std::vector<Mark> marks;
};
struct PinnedMemory {
  std::map<char*, Pinned> blocks;  // by address
  std::map<size_t, std::vector<char*>> free;
  std::vector<char*> pending;
};
PinnedMemory& pinned() {
  static auto* all = new PinnedMemory();
  return *all;
}

Pinned* pinned_block(const void* address, char** start = nullptr) {
  auto& blocks = pinned().blocks;
  auto found = blocks.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (found == blocks.begin()) return nullptr;
  --found;
  if (static_cast<const char*>(address) >= found->first + found->second.size) return nullptr;
  if (start != nullptr) *start = found->first;
  return &found->second;
}

void free_pinned(void* context) {
  if (context == nullptr || runtime().stopping) return;
  Lock lock(runtime().mutex);
  pinned().pending.push_back(static_cast<char*>(context));
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &free_pinned, c10::Device(c10::DeviceType::CPU)};
    size_t rounded = (size + kGrain - 1) / kGrain * kGrain;
    Lock lock(runtime().mutex);
    auto& all = pinned();
    for (size_t i = 0; i < all.pending.size();) {
      char* address = all.pending[i];
      Pinned& block = all.blocks[address];
      bool is_done = true;
      for (const Mark& mark : block.marks) is_done &= mark.runner->done >= mark.position;
      if (!is_done) {
        i++;
        continue;
      }
      block.marks.clear();
      std::memset(address, 0xFF, block.size);
      all.free[block.size].push_back(address);
      all.pending.erase(all.pending.begin() + static_cast<std::ptrdiff_t>(i));
    }
    char* address;
    auto& found = all.free[rounded];
    if (!found.empty()) {
      address = found.back();
      found.pop_back();
    } else {
      address = static_cast<char*>(c10::alloc_cpu(rounded));
      std::memset(address, 0xFF, rounded);
      all.blocks[address].size = rounded;
    }
    return {address, address, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
};

}  // namespace

void* for_kernels(const void* address) {
  if (address == nullptr) return nullptr;
  return memory().device + (static_cast<const char*>(address) - memory().host);
}

Block* block_of(const c10::DataPtr& pointer) {
  if (pointer.get() == nullptr) return nullptr;
  if (pointer.get_deleter() == &DeviceAllocator::free_block_or_nothing)
    return static_cast<Block*>(pointer.get_context());
  // torch.save makes a tensor of the bytes of a storage.
  auto* address = static_cast<char*>(pointer.get());
  Lock lock(runtime().mutex);
  auto after = memory().blocks.upper_bound(address);
  Block* block = after == memory().blocks.begin() ? nullptr : std::prev(after)->second;
  TORCH_CHECK(
      block != nullptr && address < block->address + block->size,
      "a tensor of the fake accelerator has memory that its allocator does not know.");
  return block;
}

void record_stream(const c10::DataPtr& pointer, c10::Stream stream) {
  Block* block = block_of(pointer);
  if (block == nullptr) return;
  Queue& queue = queue_of(stream);
  Lock lock(runtime().mutex);
  for (Queue* each : block->recorded)
    if (each == &queue) return;
  if (&queue != block->owner) block->recorded.push_back(&queue);
}

bool is_pinned(const void* address) {
  Lock lock(runtime().mutex);
  return pinned_block(address) != nullptr;
}

void keep_pinned(const void* address, const Mark& mark) {
  Lock lock(runtime().mutex);
  Pinned* block = pinned_block(address);
  if (block != nullptr) block->marks.push_back(mark);
}

void empty_cache() {
  WithoutGil without;
  Lock lock(runtime().mutex);
  if (memory().host == nullptr) return;
  for (int device = 0; device < device_count(); device++) release_locked(lock, device);
}

MemoryUse& memory_use(int device) {
  return memory().use[device];
}

c10::Allocator* device_allocator() {
  static auto* allocator = new DeviceAllocator();
  return allocator;
}

c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator();
  return allocator;
}

void register_allocator() {
  c10::SetAllocator(kType, device_allocator());
}

}  // namespace fake
