// The parts of the fake accelerator, and what they know of each other.
//
// A launch names the memory that a kernel reads and writes, and queues the kernel on a stream. Streams are run by
// threads, as late as the waits allow. Everything about order is decided at the launch, on the host: the same program
// gives the same errors each time.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

namespace fake {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// ---- places.cpp: where in the user's Python a call was made.

struct Place {
  int32_t file = -1;
  int32_t line = 0;
  const char* call = "";
};
// The innermost line outside of torch that this thread runs. Takes the GIL: hold no lock of ours. Where a lock of
// somebody else may be held, as when a tensor is freed, `takes_gil` is false, and a thread without it has no place.
Place here(const char* call, bool takes_gil = true);
std::string text(const Place& place);
// Lets other threads of Python run in a scope, if this thread has the GIL.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();

 private:
  void* state_;
};

// ---- streams.cpp: queues of kernels, and the threads that run them.

using Lock = std::unique_lock<std::mutex>;
using Kernel = std::function<void()>;

// What is known to have happened: of each stream, the number of its first kernels.
struct Clock {
  std::vector<uint64_t> times;
  uint64_t of(size_t stream) const {
    return stream < times.size() ? times[stream] : 0;
  }
  void set(size_t stream, uint64_t time);
  void merge(const Clock& other);
};

// Kernels that one thread runs in their order: those of a stream, or of all streams where there is one hardware queue.
struct Runner {
  struct Call {
    Kernel kernel;
    Place place;
  };
  std::deque<Call> calls;
  uint64_t launched = 0, done = 0, wanted = 0;
  bool has_thread = false;
};

struct Queue {
  size_t number;
  c10::Stream stream;
  Runner* runner;
  uint64_t time = 0;  // kernels launched
  Clock clock;        // what the next kernel comes after
};

// A place in the order of a queue.
struct Mark {
  Runner* runner = nullptr;
  uint64_t position = 0;
  Clock clock;
};

// Bytes of a block that a kernel touches.
struct Block;
struct Access {
  Block* block;
  size_t begin, end;
  bool writes;
};

// All state of the fake devices of this process, behind one mutex. Never destroyed: threads use it until the end.
struct Runtime {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Queue*> queues;
  std::vector<Queue*> defaults;                                    // by device
  std::map<std::pair<int, int64_t>, Queue*> by_stream;             // by device and stream id
  Runner* only_runner = nullptr;                                   // with one hardware queue
  Clock host;                                                      // what the host has waited for
  std::vector<std::string> errors;                                 // raised by the next call of the host
  std::map<std::string, uint64_t> host_waits;                      // by place
  std::chrono::steady_clock::time_point last_launch;
  bool watched = false, stopping = false, forked = false;
  uint64_t launches = 0;
};
Runtime& runtime();
int device_count();
int current_device();
void set_current_device(int device);
Queue& queue_of(c10::Stream stream);
Queue& current_queue(int device);
c10::Stream current_stream(int device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(int device, bool of_the_pool = true);

// Queues a kernel on a stream; raises for a race, and for an error of an earlier kernel.
void launch(const char* call, Queue& queue, const std::vector<Access>& accesses, Kernel kernel);
void launch_locked(Lock& lock, Queue& queue, const Place& place, Kernel kernel);
Mark mark(Queue& queue);
Mark mark_locked(Queue& queue);
// Lets a stream wait for a mark; the host goes on.
void stream_waits(Queue& queue, const Mark& mark);
// Lets the host wait for a mark; `counted` is false for waits that an accelerator would not have.
void host_waits(const char* call, const Mark& mark, bool counted = true);
void host_waits_for_device(const char* call, int device);
bool has_passed(const Mark& mark);
void run_until(Lock& lock, const Mark& mark);
void raise_errors(Lock& lock);
void stop();
// Appends a line to this rank's file, for deadlock.py; does nothing without FAKE_LOG.
void write_log(const std::string& line);

// ---- memory.cpp: memory that the host may not touch, and pinned memory.

struct Use {
  size_t stream;
  uint64_t time;
  size_t begin, end;
  bool writes;
  Place place;
};

struct Block {
  char* address = nullptr;  // as the host knows it
  size_t size = 0;
  size_t wanted = 0;  // size that the tensor asked for
  Queue* owner = nullptr;
  int device = 0;
  std::vector<Use> uses;
  std::vector<Queue*> recorded;
};

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
void register_allocator();
// The address at which kernels find what the host knows as `address`.
void* for_kernels(const void* address);
Block* block_of(const c10::DataPtr& pointer);
void record_stream(const c10::DataPtr& pointer, c10::Stream stream);
bool is_pinned(const void* address);
// A copy that has not run yet reads or writes pinned memory.
void keep_pinned(const void* address, const Mark& mark);
void empty_cache();
struct MemoryUse {
  uint64_t allocated = 0, peak = 0, reserved = 0, peak_reserved = 0;
};
MemoryUse& memory_use(int device);

// ---- races.cpp: what a kernel may touch.

// Notes what a kernel that is launched next on `queue` touches. Returns the sentence of a race, or nothing.
std::string race(Queue& queue, const std::vector<Access>& accesses, const Place& place);
// Returns the sentence of a block that is freed while a stream may use it, or nothing.
std::string freed_too_early(const Block& block, const Place& place);

// ---- device.cpp: what torch asks a device type for.

void register_hooks();
// A seed for a kernel that draws: each launch has its own, in the order of the launches. Takes a c10::GeneratorImpl.
uint64_t next_seed(void* generator);

// ---- operators.cpp

// Gives a storage `size` bytes; a kernel copies what it had.
void resize_storage(const c10::Storage& storage, size_t size);

}  // namespace fake
