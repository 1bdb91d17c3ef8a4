// A process group with the rules of NCCL.
//
// An operation is a kernel on the stream of its communicator: it starts when all members have reached it, and blocks
// what is behind it. gloo moves the bytes, on host tensors over the kernels' view.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdio>
#include <cstdlib>
#include <sstream>

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tensors.h"

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace py = pybind11;

namespace fake {
namespace {

using Tensors = std::vector<at::Tensor>;
using InnerWork = c10::intrusive_ptr<c10d::Work>;

// One send, receive or collective of a kernel. `start` and `finish` run when the kernel does.
struct Part {
  std::string kind;
  int peer;  // rank in the group, or -1
  Tensors reads, writes;
  std::function<InnerWork(c10d::Backend&)> start;
  std::function<void()> finish;
};

struct Communicator {
  std::string name;
  std::vector<int64_t> ranks;  // of the job
  c10::intrusive_ptr<c10d::Backend> inner;
  Queue* queue = nullptr;
  uint64_t operations = 0;
  // The calls of gloo block, and an abort must not wait for them: they have a thread of their own.
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<std::function<void()>>> jobs;
  std::atomic<bool> aborted{false};
};

void serve(std::shared_ptr<Communicator> communicator) {
  while (true) {
    std::unique_lock<std::mutex> lock(communicator->mutex);
    communicator->changed.wait(lock, [&] { return !communicator->jobs.empty() || communicator->aborted; });
    if (communicator->aborted) return;
    auto job = communicator->jobs.front();
    communicator->jobs.pop_front();
    lock.unlock();
    (*job)();
  }
}

struct Outcome {
  bool done = false;
  std::string error;
};

struct State {
  std::string error;  // of an operation, or of the abort
  std::atomic<int64_t> timeout_ms;
  std::atomic<bool> aborted{false};
};

struct InFlight {
  Mark end;
  std::chrono::steady_clock::time_point started;
  std::string what;
  std::shared_ptr<Tensors> stash;
  std::shared_ptr<State> state;
  Queue* queue;
};

// Keeps the tensors of operations that nobody waits for, and ends the process when one takes too long.
struct Watchdog {
  std::mutex mutex;
  std::vector<InFlight> all;
  bool started = false;
};
Watchdog& watchdog() {
  static auto* one = new Watchdog();
  return *one;
}

bool ends_process() {
  const char* value = std::getenv("FAKE_ABORT");
  return value == nullptr || std::string(value) != "0";
}

void watch() {
  while (!runtime().stopping) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::vector<InFlight> finished, expired;
    {
      std::lock_guard<std::mutex> lock(watchdog().mutex);
      auto& all = watchdog().all;
      for (size_t i = 0; i < all.size();) {
        bool has_ended;
        {
          Lock inner(runtime().mutex);
          has_ended = all[i].end.runner->done >= all[i].end.position;
        }
        auto age = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - all[i].started);
        bool is_late = !has_ended && age.count() > all[i].state->timeout_ms && !all[i].state->aborted;
        if (has_ended || is_late) {
          (has_ended ? finished : expired).push_back(std::move(all[i]));
          all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
        } else {
          i++;
        }
      }
    }
    for (InFlight& each : finished) {
      // Whether a race is seen must not depend on this thread: the host learns nothing, and the allocator is told.
      for (const at::Tensor& tensor : *each.stash) record_stream(tensor.storage().data_ptr(), each.queue->stream);
    }
    for (InFlight& each : expired) {
      std::string error = "fccl: " + each.what + " ran longer than its timeout of " +
          std::to_string(each.state->timeout_ms.load()) + " ms" +
          (each.state->error.empty() ? "" : " (" + each.state->error + ")");
      if (ends_process()) {
        std::fprintf(stderr, "%s. The process ends, as NCCL's watchdog does it.\n", error.c_str());
        std::fflush(stderr);
        std::abort();
      }
      Lock lock(runtime().mutex);
      runtime().errors.push_back(error);
      each.state->error = error;
      each.state->aborted = true;
      runtime().changed.notify_all();
    }
    if (runtime().stopping) {
      // Memory is freed by nobody at the end of a process.
      new std::vector<InFlight>(std::move(finished));
      return;
    }
  }
}

std::string list_of(const std::vector<int64_t>& ranks) {
  std::ostringstream text;
  for (size_t i = 0; i < ranks.size(); i++) text << (i ? "," : "") << ranks[i];
  return "[" + text.str() + "]";
}

class FcclWork : public c10d::Work {
 public:
  FcclWork(int rank, c10d::OpType type, Mark end, std::string what, Tensors outputs, std::shared_ptr<Tensors> stash,
           std::shared_ptr<State> state, Queue* queue, bool stops_host)
      : Work(rank, type), end_(std::move(end)), what_(std::move(what)), outputs_(std::move(outputs)),
        stash_(std::move(stash)), state_(std::move(state)), stops_host_(stops_host) {
    if (queue == nullptr) return;
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{queue->stream.device()});
    // The future's events are recorded on the stream of the communicator.
    c10::Stream before = exchange_stream(queue->stream);
    future_->markCompleted(c10::IValue(outputs_));
    exchange_stream(before);
  }
  bool isCompleted() override {
    return end_.runner == nullptr || has_passed(end_);
  }
  bool isSuccess() const override {
    return !state_->aborted;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  bool wait(std::chrono::milliseconds) override {
    TORCH_CHECK(!state_->aborted, "fccl: ", what_, ": the communicator was aborted. ", state_->error);
    if (end_.runner == nullptr) return true;
    stream_waits(current_queue(current_device()), end_);
    if (stops_host_) host_waits("barrier", end_);
    // The current stream comes after the operation: so does whoever gets this memory next.
    if (stash_) stash_->clear();
    return true;
  }
  void blockCurrentStream() override {
    wait(kNoTimeout);
  }
  std::vector<at::Tensor> result() override {
    return outputs_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  void abort() override {
    state_->aborted = true;
    runtime().changed.notify_all();
  }

 private:
  Mark end_;
  std::string what_;
  Tensors outputs_;
  std::shared_ptr<Tensors> stash_;
  std::shared_ptr<State> state_;
  bool stops_host_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

void check(const std::string& kind, const at::Tensor& tensor) {
  TORCH_CHECK(
      is_ours(tensor), "fccl: ", kind, ": No backend type associated with device type ", tensor.device().type(),
      ". A communicator of the device takes no host tensors.");
  TORCH_CHECK(!tensor.is_sparse() && tensor.is_non_overlapping_and_dense(), "fccl: ", kind, ": Tensors must be dense.");
  TORCH_CHECK(tensor.is_contiguous(), "fccl: ", kind, ": Tensors must be contiguous.");
  switch (tensor.scalar_type()) {
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Char:
    case c10::ScalarType::Byte:
    case c10::ScalarType::Bool:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
    case c10::ScalarType::Float8_e4m3fn:
    case c10::ScalarType::Float8_e5m2:
      return;
    default:
      TORCH_CHECK(false, "fccl: ", kind, ": Unconvertible NCCL type ", tensor.scalar_type(), ".");
  }
}

// The bytes of a contiguous tensor: what moves data without looking at it.
at::Tensor bytes(const at::Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return fake::alias(tensor).view({-1}).view(c10::ScalarType::Byte);
}

Tensors all_bytes(const Tensors& tensors) {
  Tensors result;
  for (const at::Tensor& tensor : tensors) result.push_back(bytes(tensor));
  return result;
}

// What gloo reduces: it knows neither bool nor an average.
struct Reduction {
  c10d::ReduceOp op;
  bool divides = false;
};
Reduction reduction(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  bool is_bool = tensor.scalar_type() == c10::ScalarType::Bool;
  switch (op.op_) {
    case c10d::ReduceOp::AVG:
      TORCH_CHECK(!is_bool, "fccl: Cannot use ReduceOp.AVG with Boolean inputs");
      return {c10d::ReduceOp::SUM, true};
    case c10d::ReduceOp::PREMUL_SUM:
      return {c10d::ReduceOp::SUM, false};
    case c10d::ReduceOp::BAND:
    case c10d::ReduceOp::BOR:
    case c10d::ReduceOp::BXOR:
      TORCH_CHECK(false, "fccl: Cannot use ReduceOp.BAND, BOR or BXOR with NCCL.");
    case c10d::ReduceOp::SUM:
      return {is_bool ? c10d::ReduceOp(c10d::ReduceOp::MAX) : op, false};
    default:
      return {op, false};
  }
}

void multiply_first(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return;
  auto* supplement = dynamic_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(supplement != nullptr && !supplement->tensor_factor.defined(), "fccl: the factor must be a number.");
  tensor.mul_(supplement->double_factor);
}

at::Tensor for_reduction(const at::Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor flat = fake::alias(tensor).view({-1});
  return tensor.scalar_type() == c10::ScalarType::Bool ? flat.view(c10::ScalarType::Byte) : flat;
}

class ProcessGroupFccl : public c10d::Backend {
 public:
  using Connect = std::function<c10::intrusive_ptr<c10d::Backend>(std::string, int, int)>;

  ProcessGroupFccl(int rank, int size, std::string name, std::vector<int64_t> ranks, int64_t timeout_ms, Connect connect)
      : Backend(rank, size), name_(std::move(name)), ranks_(std::move(ranks)), connect_(std::move(connect)),
        state_(std::make_shared<State>()) {
    state_->timeout_ms = timeout_ms;
  }
  ~ProcessGroupFccl() override {
    // The callable of Python is part of the interpreter, which may be gone.
    if (Py_IsInitialized()) {
      py::gil_scoped_acquire gil;
      connect_ = nullptr;
    } else {
      new Connect(std::move(connect_));
    }
  }
  const std::string getBackendName() const override {
    return "fccl";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("fccl", std::chrono::milliseconds(state_->timeout_ms.load()));
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    state_->timeout_ms = timeout.count();
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return sequence_;
  }
  c10d::ErrorType getError() override {
    return state_->aborted ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
  }
  void abort() override {
    stop("The group was aborted.");
  }
  void shutdown() override {
    auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    for (auto& [key, communicator] : communicators_) {
      Mark end = mark(*communicator->queue);
      Lock lock(runtime().mutex);
      if (end.runner->wanted < end.position) end.runner->wanted = end.position;
      runtime().changed.notify_all();
      runtime().changed.wait_until(lock, limit, [&] { return end.runner->done >= end.position; });
    }
    stop("The group was shut down.");
  }

  // Coalescing: all operations until the end are one kernel of the group's communicator.
  void startCoalescing() override {
    is_coalescing_ = true;
  }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    is_coalescing_ = false;
    std::vector<Part> parts;
    parts.swap(coalesced_);
    if (parts.empty()) return none();
    return launched(c10d::OpType::COALESCED, communicator("all", ranks_, getRank()), std::move(parts), false);
  }

  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int peer, int) override {
    return message("send", tensors, peer);
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int peer, int) override {
    return message("recv", tensors, peer);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    check("broadcast", one(tensors));
    bool is_root = options.rootRank == getRank();
    Part part{"broadcast", static_cast<int>(options.rootRank), is_root ? tensors : Tensors{}, is_root ? Tensors{} : tensors};
    part.start = [own = all_bytes(tensors), options](c10d::Backend& inner) mutable { return inner.broadcast(own, options); };
    return collective(c10d::OpType::BROADCAST, std::move(part));
  }
  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return collective(c10d::OpType::ALLREDUCE, sum("all_reduce", one(tensors), options.reduceOp));
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<Part> parts;
    for (const at::Tensor& tensor : tensors) parts.push_back(sum("all_reduce", tensor, options.reduceOp));
    return together(c10d::OpType::COALESCED, std::move(parts));
  }
  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check("reduce", one(tensors));
    Reduction how = reduction(options.reduceOp, tensors[0]);
    bool is_root = options.rootRank == getRank();
    Part part{"reduce", static_cast<int>(options.rootRank), is_root ? Tensors{} : tensors, is_root ? tensors : Tensors{}};
    auto given = for_reduction(tensors[0]);
    auto own = std::make_shared<Tensors>();
    int size = getSize();
    c10d::ReduceOp asked = options.reduceOp;
    part.start = [own, given, options, how, is_root, asked](c10d::Backend& inner) {
      *own = {is_root ? given : given.clone()};
      multiply_first(asked, (*own)[0]);
      c10d::ReduceOptions with = options;
      with.reduceOp = how.op;
      return inner.reduce(*own, with);
    };
    part.finish = [own, how, size, is_root] {
      if (how.divides && is_root) (*own)[0].div_(size);
    };
    return collective(c10d::OpType::REDUCE, std::move(part));
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    check("all_gather", one(inputs));
    for (const at::Tensor& output : outputs.at(0)) check("all_gather", output);
    Part part{"all_gather", -1, inputs, outputs[0]};
    part.start = [to = std::vector<Tensors>{all_bytes(outputs[0])}, from = all_bytes(inputs), options](
                     c10d::Backend& inner) mutable { return inner.allgather(to, from, options); };
    return collective(c10d::OpType::ALLGATHER, std::move(part));
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return collective(c10d::OpType::_ALLGATHER_BASE, gathered(output, input, options));
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Part> parts;
    for (size_t i = 0; i < outputs.size(); i++) parts.push_back(gathered(outputs[i], inputs[i], options));
    return together(c10d::OpType::COALESCED, std::move(parts));
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    check("reduce_scatter", one(outputs));
    for (const at::Tensor& input : inputs.at(0)) check("reduce_scatter", input);
    Tensors given;
    for (const at::Tensor& input : inputs[0]) given.push_back(for_reduction(input));
    Part part = scattered(outputs[0], inputs[0], given, options.reduceOp);
    return collective(c10d::OpType::REDUCE_SCATTER, std::move(part));
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    check("reduce_scatter", output);
    check("reduce_scatter", input);
    return collective(
        c10d::OpType::_REDUCE_SCATTER_BASE, scattered(output, {input}, {for_reduction(input)}, options.reduceOp));
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    std::vector<Part> parts;
    for (size_t i = 0; i < outputs.size(); i++) {
      check("reduce_scatter", outputs[i]);
      check("reduce_scatter", inputs[i]);
      parts.push_back(scattered(outputs[i], {inputs[i]}, {for_reduction(inputs[i])}, options.reduceOp));
    }
    return together(c10d::OpType::COALESCED, std::move(parts));
  }
  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    check("gather", one(inputs));
    bool is_root = options.rootRank == getRank();
    Part part{"gather", static_cast<int>(options.rootRank), inputs, is_root ? outputs.at(0) : Tensors{}};
    for (const at::Tensor& output : part.writes) check("gather", output);
    std::vector<Tensors> to;
    if (is_root) to.push_back(all_bytes(outputs[0]));
    part.start = [to, from = all_bytes(inputs), options](c10d::Backend& inner) mutable {
      return inner.gather(to, from, options);
    };
    return collective(c10d::OpType::GATHER, std::move(part));
  }
  c10::intrusive_ptr<c10d::Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    check("scatter", one(outputs));
    bool is_root = options.rootRank == getRank();
    Part part{"scatter", static_cast<int>(options.rootRank), is_root ? inputs.at(0) : Tensors{}, outputs};
    for (const at::Tensor& input : part.reads) check("scatter", input);
    std::vector<Tensors> from;
    if (is_root) from.push_back(all_bytes(inputs[0]));
    part.start = [from, to = all_bytes(outputs), options](c10d::Backend& inner) mutable {
      return inner.scatter(to, from, options);
    };
    return collective(c10d::OpType::SCATTER, std::move(part));
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    check("all_to_all", output);
    check("all_to_all", input);
    auto in_bytes = [](const at::Tensor& tensor, const std::vector<int64_t>& sizes) {
      std::vector<int64_t> result;
      int64_t row = tensor.dim() == 0 || tensor.size(0) == 0 ? 0 : static_cast<int64_t>(tensor.nbytes()) / tensor.size(0);
      for (int64_t size : sizes) result.push_back(size * row);
      return result;
    };
    Part part{"all_to_all", -1, {input}, {output}};
    part.start = [to = bytes(output), from = bytes(input), to_sizes = in_bytes(output, output_sizes),
                  from_sizes = in_bytes(input, input_sizes), options](c10d::Backend& inner) mutable {
      return inner.alltoall_base(to, from, to_sizes, from_sizes, options);
    };
    return collective(c10d::OpType::ALLTOALL_BASE, std::move(part));
  }
  c10::intrusive_ptr<c10d::Work> alltoall(
      Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    std::vector<int64_t> to_sizes, from_sizes;
    for (const at::Tensor& tensor : outputs) {
      check("all_to_all", tensor);
      to_sizes.push_back(static_cast<int64_t>(tensor.nbytes()));
    }
    for (const at::Tensor& tensor : inputs) {
      check("all_to_all", tensor);
      from_sizes.push_back(static_cast<int64_t>(tensor.nbytes()));
    }
    Part part{"all_to_all", -1, inputs, outputs};
    auto whole = std::make_shared<at::Tensor>();
    auto targets = all_bytes(outputs);
    part.start = [whole, targets, from = all_bytes(inputs), to_sizes, from_sizes, options](c10d::Backend& inner) mutable {
      at::Tensor sent = at::cat(from);
      int64_t received = 0;
      for (int64_t size : to_sizes) received += size;
      *whole = at::empty({received}, sent.options());
      return inner.alltoall_base(*whole, sent, to_sizes, from_sizes, options);
    };
    part.finish = [whole, targets, to_sizes] {
      auto chunks = whole->split_with_sizes(to_sizes);
      for (size_t i = 0; i < targets.size(); i++) targets[i].copy_(chunks[i]);
    };
    return collective(c10d::OpType::ALLTOALL, std::move(part));
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    Part part{"barrier", -1, {}, {}};
    part.start = [options](c10d::Backend& inner) {
      c10d::BarrierOptions with = options;
      with.device_ids.clear();
      with.device = std::nullopt;
      return inner.barrier(with);
    };
    return collective(c10d::OpType::BARRIER, std::move(part), true);
  }

 private:
  static const at::Tensor& one(const Tensors& tensors) {
    TORCH_CHECK(tensors.size() == 1, "fccl: Expecting one tensor only but got ", tensors.size(), ".");
    return tensors[0];
  }
  c10::intrusive_ptr<c10d::Work> none() {
    return c10::make_intrusive<FcclWork>(
        getRank(), c10d::OpType::UNKNOWN, Mark{}, "nothing", Tensors{}, nullptr, state_, nullptr, false);
  }
  void stop(const std::string& why) {
    Lock lock(runtime().mutex);
    if (!state_->aborted) state_->error = why;
    state_->aborted = true;
    for (auto& [key, communicator] : communicators_) {
      std::lock_guard<std::mutex> inner(communicator->mutex);
      communicator->aborted = true;
      communicator->changed.notify_all();
    }
    runtime().changed.notify_all();
  }

  // The first use stops the host until all members have come, as with lazy communicators of NCCL.
  std::shared_ptr<Communicator> communicator(const std::string& key, const std::vector<int64_t>& ranks, int rank) {
    auto found = communicators_.find(key);
    if (found != communicators_.end()) return found->second;
    write_log("{\"kind\": \"connect\", \"communicator\": \"" + name_ + "/" + key + "\", \"ranks\": " + list_of(ranks) + "}");
    auto made = std::make_shared<Communicator>();
    made->name = name_ + "/" + key;
    made->ranks = ranks;
    {
      py::gil_scoped_acquire gil;
      made->inner = connect_(key, rank, static_cast<int>(ranks.size()));
    }
    made->queue = &queue_of(new_stream(current_device(), false));
    std::thread(serve, made).detach();
    communicators_[key] = made;
    return made;
  }

  Part sum(const char* kind, const at::Tensor& tensor, const c10d::ReduceOp& op) {
    check(kind, tensor);
    Reduction how = reduction(op, tensor);
    Part part{kind, -1, {}, {tensor}};
    auto own = std::make_shared<Tensors>(Tensors{for_reduction(tensor)});
    part.start = [own, how, op](c10d::Backend& inner) {
      multiply_first(op, (*own)[0]);
      c10d::AllreduceOptions with;
      with.reduceOp = how.op;
      return inner.allreduce(*own, with);
    };
    part.finish = [own, how, size = getSize()] {
      if (how.divides) (*own)[0].div_(size);
    };
    return part;
  }
  Part gathered(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
    check("all_gather", output);
    check("all_gather", input);
    TORCH_CHECK(
        output.numel() == input.numel() * getSize() && output.scalar_type() == input.scalar_type(),
        "fccl: output tensor size must be equal to world_size times input tensor size, got ", output.numel(), " and ",
        input.numel(), " of ", getSize(), " ranks.");
    Part part{"all_gather", -1, {input}, {output}};
    part.start = [to = bytes(output), from = bytes(input), options](c10d::Backend& inner) mutable {
      // gloo copies its own part; here the input may be that part.
      at::Tensor own = from.clone();
      return inner._allgather_base(to, own, options);
    };
    return part;
  }
  Part scattered(const at::Tensor& output, Tensors inputs, Tensors given, const c10d::ReduceOp& op) {
    Reduction how = reduction(op, output);
    int64_t elements = 0;
    for (const at::Tensor& input : inputs) elements += input.numel();
    TORCH_CHECK(
        elements == output.numel() * getSize(),
        "fccl: input tensor must be the same size as output size times world size, got ", elements, " and ",
        output.numel(), " of ", getSize(), " ranks.");
    Part part{"reduce_scatter", -1, std::move(inputs), {output}};
    auto whole = std::make_shared<Tensors>();
    part.start = [whole, given, how, op](c10d::Backend& inner) {
      *whole = {at::cat(given)};
      multiply_first(op, (*whole)[0]);
      c10d::AllreduceOptions with;
      with.reduceOp = how.op;
      return inner.allreduce(*whole, with);
    };
    part.finish = [whole, how, to = for_reduction(output), rank = getRank(), size = getSize()] {
      at::Tensor own = (*whole)[0].narrow(0, rank * to.numel(), to.numel());
      to.copy_(own);
      if (how.divides) to.div_(size);
    };
    return part;
  }

  c10::intrusive_ptr<c10d::Work> message(const char* kind, Tensors& tensors, int peer) {
    check(kind, one(tensors));
    TORCH_CHECK(peer != getRank() || is_coalescing_, "fccl: ", kind, ": a rank has no messages for itself.");
    bool sends = std::string(kind) == "send";
    Part part{kind, peer, sends ? tensors : Tensors{}, sends ? Tensors{} : tensors};
    int number = is_coalescing_ ? peer : (peer < getRank() ? 0 : 1);
    // NCCL has no tags.
    part.start = [own = all_bytes(tensors), number, sends](c10d::Backend& inner) mutable {
      return sends ? inner.send(own, number, 0) : inner.recv(own, number, 0);
    };
    c10d::OpType type = sends ? c10d::OpType::SEND : c10d::OpType::RECV;
    if (is_coalescing_) {
      coalesced_.push_back(std::move(part));
      return none();
    }
    // Two ranks have a communicator of their own.
    int low = std::min(peer, getRank()), high = std::max(peer, getRank());
    std::string key = std::to_string(low) + ":" + std::to_string(high);
    std::vector<Part> parts;
    parts.push_back(std::move(part));
    auto pair = communicator(key, {ranks_[low], ranks_[high]}, getRank() == low ? 0 : 1);
    return launched(type, pair, std::move(parts), false);
  }
  c10::intrusive_ptr<c10d::Work> collective(c10d::OpType type, Part part, bool stops_host = false) {
    std::vector<Part> parts;
    parts.push_back(std::move(part));
    return together(type, std::move(parts), stops_host);
  }
  c10::intrusive_ptr<c10d::Work> together(c10d::OpType type, std::vector<Part> parts, bool stops_host = false) {
    if (is_coalescing_) {
      for (Part& part : parts) coalesced_.push_back(std::move(part));
      return none();
    }
    return launched(type, communicator("all", ranks_, getRank()), std::move(parts), stops_host);
  }

  c10::intrusive_ptr<c10d::Work> launched(
      c10d::OpType type, std::shared_ptr<Communicator> communicator, std::vector<Part> parts, bool stops_host) {
    TORCH_CHECK(!state_->aborted, "fccl: the communicator was aborted. ", state_->error);
    Queue& queue = *communicator->queue;
    std::vector<Access> accesses;
    Tensors outputs;
    auto stash = std::make_shared<Tensors>();
    std::string kinds, list;
    size_t total = 0;
    for (const Part& part : parts) {
      size_t size = 0;
      for (const at::Tensor& tensor : part.reads) {
        add_access(accesses, tensor, false);
        stash->push_back(tensor);
        size += tensor.nbytes();
      }
      for (const at::Tensor& tensor : part.writes) {
        add_access(accesses, tensor, true);
        outputs.push_back(tensor);
        stash->push_back(tensor);
        size += tensor.nbytes();
      }
      kinds += (kinds.empty() ? "" : "+") + part.kind;
      bool has_peer = part.kind == "send" || part.kind == "recv";
      int64_t peer = has_peer ? ranks_[part.peer] : -1;
      list += (list.empty() ? "" : ", ") + ("{\"kind\": \"" + part.kind) + "\", \"peer\": " + std::to_string(peer) +
          ", \"bytes\": " + std::to_string(size) + "}";
      total += size;
    }
    uint64_t number = communicator->operations++;
    sequence_++;
    std::string what = kinds + " number " + std::to_string(number) + " of communicator " + communicator->name +
        " of ranks " + list_of(communicator->ranks);
    write_log(
        "{\"kind\": \"operation\", \"communicator\": \"" + communicator->name + "\", \"ranks\": " +
        list_of(communicator->ranks) + ", \"number\": " + std::to_string(number) + ", \"stream\": " +
        std::to_string(queue.number) + ", \"bytes\": " + std::to_string(total) + ", \"parts\": [" + list + "]}");
    stream_waits(queue, mark(current_queue(queue.stream.device_index())));
    auto shared = std::make_shared<std::vector<Part>>(std::move(parts));
    // The tensors are kept by the stash, and not by the kernel.
    for (Part& part : *shared) {
      part.reads.clear();
      part.writes.clear();
    }
    // A name must outlive its kernel; there are few.
    launch(kept(kinds), queue, accesses, [communicator, shared, state = state_, what] { run(communicator, shared, state, what); });
    Mark end = mark(queue);
    {
      std::lock_guard<std::mutex> lock(watchdog().mutex);
      if (!watchdog().started) {
        watchdog().started = true;
        std::thread(watch).detach();
      }
      watchdog().all.push_back({end, std::chrono::steady_clock::now(), what, stash, state_, &queue});
    }
    return c10::make_intrusive<FcclWork>(
        getRank(), type, end, what, std::move(outputs), stash, state_, &queue, stops_host);
  }

  static const char* kept(const std::string& name) {
    static auto* names = new std::map<std::string, int>();
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    return names->emplace(name, 0).first->first.c_str();
  }

  // The kernel: blocks its stream until gloo has moved the bytes. A peer that died is a kernel that never ends.
  static void run(
      const std::shared_ptr<Communicator>& communicator, const std::shared_ptr<std::vector<Part>>& parts,
      const std::shared_ptr<State>& state, const std::string& what) {
    auto outcome = std::make_shared<Outcome>();
    auto job = std::make_shared<std::function<void()>>([communicator, parts, outcome] {
      at::AutoDispatchBelowADInplaceOrView guard;
      std::string error;
      try {
        std::vector<InnerWork> works;
        for (Part& part : *parts) works.push_back(part.start(*communicator->inner));
        for (auto& work : works) work->wait();
        for (Part& part : *parts)
          if (part.finish) part.finish();
      } catch (const std::exception& caught) {
        error = caught.what();
        error = error.substr(0, error.find('\n'));
      }
      Lock lock(runtime().mutex);
      outcome->error = error;
      outcome->done = error.empty();
      runtime().changed.notify_all();
    });
    {
      std::lock_guard<std::mutex> lock(communicator->mutex);
      communicator->jobs.push_back(job);
      communicator->changed.notify_all();
    }
    Lock lock(runtime().mutex);
    runtime().changed.wait(
        lock, [&] { return outcome->done || !outcome->error.empty() || state->aborted || runtime().stopping; });
    if (!outcome->error.empty()) {
      if (!state->aborted) state->error = what + " failed: " + outcome->error;
      runtime().changed.wait(lock, [&] { return state->aborted || runtime().stopping; });
    }
  }

  std::string name_;
  std::vector<int64_t> ranks_;
  Connect connect_;
  std::shared_ptr<State> state_;
  std::map<std::string, std::shared_ptr<Communicator>> communicators_;
  bool is_coalescing_ = false;
  std::vector<Part> coalesced_;
  uint64_t sequence_ = 0;
};

}  // namespace

void bind_process_group(py::module_& module) {
  // torch has the class of the result.
  py::module_::import("torch._C._distributed_c10d");
  module.def(
      "create",
      [](int rank, int size, std::string name, std::vector<int64_t> ranks, int64_t timeout_ms, py::function connect) {
        auto call = std::make_shared<py::function>(std::move(connect));
        ProcessGroupFccl::Connect inner = [call](const std::string& key, int number, int members) {
          return (*call)(key, number, members).cast<c10::intrusive_ptr<c10d::Backend>>();
        };
        return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<ProcessGroupFccl>(
            rank, size, std::move(name), std::move(ranks), timeout_ms, std::move(inner)));
      });
}

}  // namespace fake
