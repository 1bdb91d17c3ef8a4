// Queues of kernels, and the threads that run them.
//
// A kernel runs as late as possible: when the host or another stream waits for it, when the host has launched nothing
// for some milliseconds (other processes wait for its messages), or when too many kernels are queued.
#include "fake.h"

#include <cstdlib>
#include <fstream>

#include <c10/util/Exception.h>

namespace fake {
namespace {

// CUDA's launch queue has about as many places.
constexpr uint64_t kMostQueued = 1024;
// CUDA has as many streams, and gives them again.
constexpr size_t kPool = 32;
constexpr auto kIdle = std::chrono::milliseconds(5);

bool has_one_queue() {
  static const bool one = [] {
    const char* value = std::getenv("FAKE_ONE_QUEUE");
    return value != nullptr && std::string(value) == "1";
  }();
  return one;
}

thread_local int this_device = 0;
thread_local std::map<int, Queue*> this_queue;
thread_local bool runs_kernels = false;

// Appends what each rank launches to a file, for deadlock.py.
struct Log {
  std::mutex mutex;
  std::ofstream file;
};
Log* log_file() {
  static Log* log = []() -> Log* {
    const char* folder = std::getenv("FAKE_LOG");
    if (folder == nullptr) return nullptr;
    const char* rank = std::getenv("RANK");
    auto* made = new Log();
    made->file.open(std::string(folder) + "/rank" + (rank ? rank : "0") + ".jsonl", std::ios::app);
    return made;
  }();
  return log;
}

void run(Runner* runner) {
  runs_kernels = true;
  Runtime& all = runtime();
  Lock lock(all.mutex);
  while (true) {
    all.changed.wait(lock, [&] { return all.stopping || runner->done < runner->wanted; });
    if (all.stopping) return;
    Runner::Call call = std::move(runner->calls.front());
    runner->calls.pop_front();
    lock.unlock();
    std::string error;
    try {
      call.kernel();
    } catch (const std::exception& caught) {
      error = caught.what();
      error = "a kernel failed: " + error.substr(0, error.find('\n'));
    }
    if (!error.empty()) error += ". Launched by " + text(call.place);
    call.kernel = nullptr;
    lock.lock();
    if (!error.empty()) all.errors.push_back(error);
    runner->done++;
    all.changed.notify_all();
  }
}

// Runs everything when the host has launched nothing for a while.
void watch() {
  Runtime& all = runtime();
  Lock lock(all.mutex);
  while (!all.stopping) {
    bool is_idle = std::chrono::steady_clock::now() - all.last_launch > kIdle;
    bool wants = false;
    for (Queue* queue : all.queues) {
      Runner& runner = *queue->runner;
      if (is_idle && runner.wanted < runner.launched) {
        runner.wanted = runner.launched;
        wants = true;
      }
    }
    if (wants) all.changed.notify_all();
    lock.unlock();
    std::this_thread::sleep_for(kIdle);
    lock.lock();
  }
}

void start_threads(Runner& runner) {
  Runtime& all = runtime();
  if (!runner.has_thread) {
    runner.has_thread = true;
    std::thread(run, &runner).detach();
  }
  if (!all.watched) {
    all.watched = true;
    std::thread(watch).detach();
  }
}

Queue* make_queue(int device, int64_t id) {
  Runtime& all = runtime();
  c10::Stream stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<c10::DeviceIndex>(device)), id);
  Runner* runner = nullptr;
  if (has_one_queue()) {
    if (all.only_runner == nullptr) all.only_runner = new Runner();
    runner = all.only_runner;
  } else {
    runner = new Runner();
  }
  auto* queue = new Queue{all.queues.size(), stream, runner};
  all.queues.push_back(queue);
  all.by_stream[{device, id}] = queue;
  return queue;
}

Queue* find_queue(int device, int64_t id) {
  auto found = runtime().by_stream.find({device, id});
  if (found != runtime().by_stream.end()) return found->second;
  TORCH_CHECK(id == 0, "stream ", id, " of fake:", device, " does not exist.");
  return make_queue(device, 0);
}

}  // namespace

void Clock::set(size_t stream, uint64_t time) {
  if (times.size() <= stream) times.resize(stream + 1, 0);
  times[stream] = time;
}

void Clock::merge(const Clock& other) {
  if (times.size() < other.times.size()) times.resize(other.times.size(), 0);
  for (size_t i = 0; i < other.times.size(); i++) times[i] = std::max(times[i], other.times[i]);
}

Runtime& runtime() {
  static auto* all = new Runtime();
  return *all;
}

int device_count() {
  static const int count = [] {
    const char* value = std::getenv("FAKE_DEVICES");
    return value == nullptr ? 1 : std::atoi(value);
  }();
  return count;
}

int current_device() {
  return this_device;
}

void set_current_device(int device) {
  TORCH_CHECK(
      device >= 0 && device < device_count(), "fake:", device, " does not exist: this process has ", device_count(),
      " fake devices. Set FAKE_DEVICES before the first use.");
  this_device = device;
}

Queue& queue_of(c10::Stream stream) {
  Lock lock(runtime().mutex);
  return *find_queue(stream.device_index(), stream.id());
}

Queue& current_queue(int device) {
  auto found = this_queue.find(device);
  if (found != this_queue.end()) return *found->second;
  Lock lock(runtime().mutex);
  return *find_queue(device, 0);
}

c10::Stream current_stream(int device) {
  return current_queue(device).stream;
}

c10::Stream exchange_stream(c10::Stream stream) {
  Queue& queue = queue_of(stream);
  c10::Stream before = current_stream(stream.device_index());
  this_queue[stream.device_index()] = &queue;
  return before;
}

c10::Stream new_stream(int device, bool of_the_pool) {
  static std::map<int, std::vector<Queue*>> pools;
  static std::map<int, size_t> next;
  Lock lock(runtime().mutex);
  find_queue(device, 0);
  auto& pool = pools[device];
  if (of_the_pool && pool.size() == kPool) return pool[next[device]++ % kPool]->stream;
  Queue* made = make_queue(device, static_cast<int64_t>(runtime().queues.size()));
  if (of_the_pool) pool.push_back(made);
  return made->stream;
}

void raise_errors(Lock& lock) {
  Runtime& all = runtime();
  if (all.errors.empty() || runs_kernels) return;
  std::string error = all.errors.front();
  all.errors.clear();
  lock.unlock();
  TORCH_CHECK(false, "fake accelerator: ", error);
}

void launch_locked(Lock& lock, Queue& queue, const Place& place, Kernel kernel) {
  Runtime& all = runtime();
  Runner& runner = *queue.runner;
  start_threads(runner);
  runner.calls.push_back({std::move(kernel), place});
  runner.launched++;
  queue.time++;
  queue.clock.set(queue.number, queue.time);
  all.launches++;
  all.last_launch = std::chrono::steady_clock::now();
  if (runner.launched - runner.done > kMostQueued && !runs_kernels) {
    uint64_t target = runner.launched - kMostQueued;
    if (runner.wanted < target) runner.wanted = target;
    all.changed.notify_all();
    {
      WithoutGil without;
      all.changed.wait(lock, [&] { return all.stopping || runner.done >= target; });
      // Who waits for the GIL has no lock.
      lock.unlock();
    }
    lock.lock();
  }
}

void launch(const char* call, Queue& queue, const std::vector<Access>& accesses, Kernel kernel) {
  Place place = here(call);
  Runtime& all = runtime();
  TORCH_CHECK(!all.forked, "the fake accelerator was used before this process was forked. Start the process otherwise.");
  Lock lock(all.mutex);
  raise_errors(lock);
  queue.clock.merge(all.host);
  std::string error = race(queue, accesses, place);
  if (!error.empty()) {
    lock.unlock();
    TORCH_CHECK(false, "fake accelerator: ", error);
  }
  launch_locked(lock, queue, place, std::move(kernel));
}

Mark mark_locked(Queue& queue) {
  Clock clock = queue.clock;
  clock.merge(runtime().host);
  return {queue.runner, queue.runner->launched, std::move(clock)};
}

Mark mark(Queue& queue) {
  Lock lock(runtime().mutex);
  return mark_locked(queue);
}

void run_until(Lock& lock, const Mark& mark) {
  Runtime& all = runtime();
  if (mark.runner == nullptr) return;
  if (mark.runner->wanted < mark.position) {
    mark.runner->wanted = mark.position;
    all.changed.notify_all();
  }
  all.changed.wait(lock, [&] { return all.stopping || mark.runner->done >= mark.position; });
}

void stream_waits(Queue& queue, const Mark& mark) {
  if (mark.runner == nullptr) return;
  Lock lock(runtime().mutex);
  queue.clock.merge(mark.clock);
  // In one hardware queue the order of the launches is the order of the kernels.
  if (mark.runner == queue.runner) return;
  launch_locked(lock, queue, {-1, 0, "a wait for another stream"}, [until = mark] {
    Lock inner(runtime().mutex);
    run_until(inner, until);
  });
}

void host_waits(const char* call, const Mark& mark, bool counted) {
  Place place = here(call);
  Runtime& all = runtime();
  WithoutGil without;
  if (counted) write_log("{\"kind\": \"wait\"}");
  Lock lock(all.mutex);
  if (counted) all.host_waits[text(place)]++;
  run_until(lock, mark);
  all.host.merge(mark.clock);
  raise_errors(lock);
}

void host_waits_for_device(const char* call, int device) {
  std::vector<Mark> marks;
  {
    Lock lock(runtime().mutex);
    for (Queue* queue : runtime().queues)
      if (queue->stream.device_index() == device) marks.push_back(mark_locked(*queue));
  }
  bool first = true;
  for (const Mark& each : marks) {
    host_waits(call, each, first);
    first = false;
  }
  Lock lock(runtime().mutex);
  raise_errors(lock);
}

void write_log(const std::string& line) {
  Log* log = log_file();
  if (log == nullptr) return;
  std::lock_guard<std::mutex> lock(log->mutex);
  log->file << line << "\n" << std::flush;
}

bool has_passed(const Mark& mark) {
  Lock lock(runtime().mutex);
  if (mark.runner != nullptr && mark.runner->done < mark.position) return false;
  runtime().host.merge(mark.clock);
  return true;
}

void stop() {
  Runtime& all = runtime();
  Lock lock(all.mutex);
  all.stopping = true;
  all.changed.notify_all();
}

}  // namespace fake
