// Operators: the CPU's kernels, over the kernels' view of the memory, queued on the current stream.
//
// torch composes most operators of others; what is left comes to `fallback`. Shapes are found by the meta device, so
// the host does not wait for values.
#include "tensors.h"

#include <Python.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace fake {
namespace {

// A tensor of ours with the layout of a tensor over the bytes of `base`.
at::Tensor over(const at::Tensor& base, const at::Tensor& layout) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), layout.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(layout.storage_offset());
  impl->set_sizes_and_strides(layout.sizes(), layout.strides());
  return made;
}

Access access(const at::Tensor& tensor, bool writes) {
  size_t last = static_cast<size_t>(tensor.storage_offset());
  for (int64_t i = 0; i < tensor.dim(); i++)
    last += static_cast<size_t>(std::max<int64_t>(tensor.size(i) - 1, 0) * tensor.stride(i));
  size_t item = tensor.itemsize();
  return {block_of(tensor.storage().data_ptr()), static_cast<size_t>(tensor.storage_offset()) * item, (last + 1) * item, writes};
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, c10::ScalarType dtype, c10::Device device) {
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

c10::Device with_index(std::optional<c10::Device> device) {
  if (device.has_value() && device->has_index()) return *device;
  return {kType, static_cast<c10::DeviceIndex>(current_device())};
}

using Change = std::function<at::Tensor(const at::Tensor&)>;

// Changes the tensors of an argument.
c10::IValue changed(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? c10::IValue(change(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? change(tensor) : tensor);
    return list;
  }
  if (value.isList() && value.toListRef().size() > 0) {
    bool has_tensor = false;
    for (const c10::IValue& item : value.toListRef()) has_tensor |= item.isTensor();
    if (!has_tensor) return value;
    c10::List<std::optional<at::Tensor>> list;
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor() && item.toTensor().defined()) {
        list.push_back(change(item.toTensor()));
      } else {
        list.push_back(std::nullopt);
      }
    }
    return list;
  }
  return value;
}

void for_each(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  changed(value, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

bool has(const c10::OperatorHandle& op, at::Tag tag) {
  return op.hasTag(tag);
}

// Operators whose result decides what the host does next.
bool asks(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  const std::string& name = op.schema().name();
  // The shape of the output was known: a mask has been asked by nonzero.
  if (name == "aten::index" && op.schema().overload_name() == "Tensor_out") return false;
  if (name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_") {
    bool has_mask = false;
    for_each(arguments[1], [&](const at::Tensor& index) {
      has_mask |= index.scalar_type() == c10::ScalarType::Bool || index.scalar_type() == c10::ScalarType::Byte;
    });
    return has_mask;
  }
  return has(op, at::Tag::data_dependent_output) || has(op, at::Tag::dynamic_output_shape);
}

// The CPU's kernels give the output the size of the input first, and the memory of a device has one size.
bool resizes_its_output(const std::string& name) {
  return name == "aten::mse_loss" || name == "aten::smooth_l1_loss";
}

// Host tensors that operators of CUDA take: a number, and the indices of an index.
bool may_be_on_host(const c10::OperatorHandle& op, size_t argument, const at::Tensor& tensor) {
  const std::string& name = op.schema().name();
  bool indexes = name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_";
  return tensor.dim() == 0 || (indexes && argument == 1);
}

struct Arguments {
  std::vector<at::Tensor> ours;
  std::vector<at::Tensor> written;
  std::vector<Access> accesses;
  std::optional<c10::Device> device;
};

Arguments look_at(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  Arguments found;
  for (size_t i = 0; i < stack.size(); i++) {
    const auto* info = op.schema().arguments()[i].alias_info();
    bool writes = info != nullptr && info->isWrite();
    if (stack[i].isDevice() && !found.device) found.device = with_index(stack[i].toDevice());
    for_each(stack[i], [&](const at::Tensor& tensor) {
      if (is_ours(tensor)) {
        TORCH_CHECK(
            found.ours.empty() || found.ours[0].device() == tensor.device(),
            "Expected all tensors to be on the same device, but found at least two devices, ", found.ours[0].device(),
            " and ", tensor.device(), "! (in ", op.schema().name(), ")");
        found.ours.push_back(tensor);
        if (writes) found.written.push_back(tensor);
        add_access(found.accesses, tensor, writes);
      }
    });
  }
  if (!found.ours.empty()) found.device = found.ours[0].device();
  if (!found.device) found.device = with_index(std::nullopt);
  for (size_t i = 0; i < stack.size(); i++) {
    for_each(stack[i], [&](const at::Tensor& tensor) {
      TORCH_CHECK(
          is_ours(tensor) || may_be_on_host(op, i, tensor),
          "Expected all tensors to be on the same device, but found at least two devices, ", *found.device, " and ",
          tensor.device(), "! (in ", op.schema().name(), ")");
    });
  }
  return found;
}

// What a kernel of the CPU gets.
torch::jit::Stack for_cpu(const c10::OperatorHandle& op, const torch::jit::Stack& stack, c10::Device device) {
  torch::jit::Stack result;
  bool has_generator = false;
  for (size_t i = 0; i < stack.size(); i++) {
    const auto& argument = op.schema().arguments()[i];
    bool takes_generator = argument.type()->str().find("Generator") != std::string::npos;
    if (takes_generator) {
      has_generator = true;
      at::Generator generator;
      if (stack[i].isNone()) {
        generator = at::detail::getPrivateUse1Hooks().getDefaultGenerator(device.index());
      } else {
        generator = stack[i].toGenerator();
        TORCH_CHECK(
            generator.device().type() == kType, "Expected a 'fake' device type for generator but found '",
            generator.device(), "'");
      }
      result.emplace_back(at::detail::createCPUGenerator(next_seed(generator.unsafeGetGeneratorImpl())));
    } else if (stack[i].isDevice()) {
      result.emplace_back(c10::Device(c10::DeviceType::CPU));
    } else {
      result.push_back(changed(stack[i], [](const at::Tensor& tensor) {
        // The host may change its tensors before the kernel runs.
        return is_ours(tensor) ? alias(tensor) : tensor.clone();
      }));
    }
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      has_generator || !has(op, at::Tag::nondeterministic_seeded), op.schema().name(),
      " draws random numbers without a generator, which the fake accelerator cannot order.");
  return result;
}

torch::jit::Stack for_meta(const torch::jit::Stack& stack, std::map<void*, at::Tensor>& metas) {
  torch::jit::Stack result;
  for (const c10::IValue& value : stack) {
    if (value.isDevice()) {
      result.emplace_back(c10::Device(c10::DeviceType::Meta));
    } else if (value.isGenerator()) {
      result.emplace_back();
    } else {
      result.push_back(changed(value, [&](const at::Tensor& tensor) {
        if (!is_ours(tensor)) return tensor.dim() == 0 ? tensor : tensor.to(c10::Device(c10::DeviceType::Meta));
        at::Tensor meta = at::empty_strided(
            tensor.sizes(), tensor.strides(), tensor.options().device(c10::DeviceType::Meta));
        metas[tensor.unsafeGetTensorImpl()] = meta;
        return meta;
      }));
    }
  }
  return result;
}

void call_cpu(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(stack);
}

// Runs an operator while the host waits, for those whose result nobody knows before.
void run_now(const c10::OperatorHandle& op, torch::jit::Stack& arguments, const Arguments& found, torch::jit::Stack* stack, bool counted) {
  const char* name = op.schema().name().c_str();
  Queue& queue = current_queue(found.device->index());
  auto inputs = for_cpu(op, arguments, *found.device);
  auto results = std::make_shared<torch::jit::Stack>(std::move(inputs));
  launch(name, queue, found.accesses, [op, results] { call_cpu(op, *results); });
  host_waits(name, mark(queue), counted);
  for (c10::IValue& value : *results) {
    stack->push_back(changed(value, [&](const at::Tensor& tensor) {
      at::Tensor made = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), *found.device);
      std::vector<Access> writes;
      add_access(writes, made, true);
      launch(name, queue, writes, [to = alias(made), from = tensor] { to.copy_(from); });
      return made;
    }));
  }
}

void resize_outputs(const std::vector<at::Tensor>& written, const std::map<void*, at::Tensor>& metas) {
  for (const at::Tensor& tensor : written) {
    const at::Tensor& meta = metas.at(tensor.unsafeGetTensorImpl());
    if (meta.sizes() == tensor.sizes()) continue;
    auto* impl = tensor.unsafeGetTensorImpl();
    size_t bytes = (static_cast<size_t>(meta.storage_offset()) + static_cast<size_t>(meta.numel())) * tensor.itemsize();
    if (tensor.storage().nbytes() < bytes) resize_storage(tensor.storage(), bytes);
    impl->set_sizes_and_strides(meta.sizes(), meta.strides());
  }
}

// The CPU's norms of half precision have statistics in it, unless their weights are in float32; those of the meta device
// are CUDA's. The CPU's backward takes its own.
void keep_statistics_of_cpu(const std::string& name, const torch::jit::Stack& arguments, torch::jit::Stack& outputs) {
  size_t weight = name == "aten::native_layer_norm" ? 2 : name == "aten::native_group_norm" ? 1 : 0;
  if (weight == 0) return;
  c10::ScalarType dtype = arguments[0].toTensor().scalar_type();
  for (size_t i : {weight, weight + 1})
    if (arguments[i].isTensor() && arguments[i].toTensor().defined()) dtype = arguments[i].toTensor().scalar_type();
  for (size_t i : {1, 2}) outputs[i] = outputs[i].toTensor().to(dtype);
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const char* name = schema.name().c_str();
  torch::jit::Stack arguments = torch::jit::pop(*stack, schema.arguments().size());
  at::AutoDispatchBelowADInplaceOrView below;
  Arguments found = look_at(op, arguments);
  c10::OptionalDeviceGuard guard(found.device);
  bool is_view = false;
  for (const auto& result : schema.returns()) {
    is_view |= result.alias_info() != nullptr && !result.alias_info()->isWrite();
  }
  if (is_view) {
    // Views are made on the host.
    TORCH_CHECK_NOT_IMPLEMENTED(found.ours.size() == 1, name, ": the fake accelerator has no such view.");
    torch::jit::Stack views;
    for (const c10::IValue& value : arguments) views.push_back(changed(value, alias));
    call_cpu(op, views);
    for (const c10::IValue& value : views)
      stack->push_back(changed(value, [&](const at::Tensor& view) { return over(found.ours[0], view); }));
    return;
  }
  if (asks(op, arguments) && !schema.is_mutable()) {
    run_now(op, arguments, found, stack, true);
    return;
  }
  if (asks(op, arguments)) host_waits(name, mark(current_queue(found.device->index())));
  std::map<void*, at::Tensor> metas;
  auto returned = [&] {
    // An operator that changes its arguments returns them.
    size_t next = 0;
    for (const auto& result : schema.returns()) {
      (void)result;
      while (schema.arguments()[next].alias_info() == nullptr || !schema.arguments()[next].alias_info()->isWrite()) next++;
      stack->push_back(arguments[next]);
      next++;
    }
  };
  Queue& queue = current_queue(found.device->index());
  bool returns_arguments = schema.is_mutable();
  for (const auto& result : schema.returns()) returns_arguments &= result.alias_info() != nullptr;
  if (returns_arguments) {
    bool has_new_output = false;
    for (const at::Tensor& tensor : found.written) has_new_output |= tensor.numel() == 0;
    if (has_new_output && schema.overload_name().find("out") != std::string::npos) {
      auto inputs = for_meta(arguments, metas);
      op.callBoxed(inputs);
      resize_outputs(found.written, metas);
      found = look_at(op, arguments);
    }
    auto inputs = std::make_shared<torch::jit::Stack>(for_cpu(op, arguments, *found.device));
    if (resizes_its_output(name)) {
      at::Tensor target = inputs->back().toTensor();
      inputs->back() = at::empty({0}, target.options());
      launch(name, queue, found.accesses, [op, inputs, target] {
        call_cpu(op, *inputs);
        at::AutoDispatchBelowADInplaceOrView inner;
        target.copy_(inputs->back().toTensor());
      });
    } else {
      launch(name, queue, found.accesses, [op, inputs] { call_cpu(op, *inputs); });
    }
    returned();
    return;
  }
  torch::jit::Stack outputs = for_meta(arguments, metas);
  bool has_shapes = true;
  try {
    op.callBoxed(outputs);
  } catch (const c10::NotImplementedError&) {
    has_shapes = false;
  }
  if (!has_shapes) {
    run_now(op, arguments, found, stack, false);
    return;
  }
  keep_statistics_of_cpu(name, arguments, outputs);
  std::vector<at::Tensor> targets;
  std::vector<Access> accesses = found.accesses;
  for (size_t i = 0; i < outputs.size(); i++) {
    stack->push_back(changed(outputs[i], [&](const at::Tensor& meta) {
      for (auto& [impl, each] : metas) {
        if (!each.is_same(meta)) continue;
        for (const at::Tensor& tensor : found.ours)
          if (tensor.unsafeGetTensorImpl() == impl) return tensor;
      }
      at::Tensor made = empty_strided(meta.sizes(), meta.strides(), meta.scalar_type(), *found.device);
      add_access(accesses, made, true);
      targets.push_back(alias(made));
      return made;
    }));
  }
  auto inputs = std::make_shared<torch::jit::Stack>(for_cpu(op, arguments, *found.device));
  launch(name, queue, accesses, [op, inputs, targets, name] {
    std::vector<const void*> given;
    for (const c10::IValue& value : *inputs)
      for_each(value, [&](const at::Tensor& tensor) { given.push_back(tensor.unsafeGetTensorImpl()); });
    call_cpu(op, *inputs);
    at::AutoDispatchBelowADInplaceOrView guard;
    size_t next = 0;
    for (const c10::IValue& value : *inputs) {
      for_each(value, [&](const at::Tensor& tensor) {
        if (std::find(given.begin(), given.end(), tensor.unsafeGetTensorImpl()) != given.end()) return;
        TORCH_CHECK(next < targets.size(), name, " has more outputs on the CPU than on the meta device.");
        const at::Tensor& target = targets[next++];
        // The CPU leaves out what backward does not need, such as the statistics of a batch norm in evaluation.
        if (tensor.numel() > 0 || target.numel() == 0) target.copy_(tensor);
      });
    }
  });
}

// torch asks a device of another package for its own convolution: it is that of the CPU.
c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle&, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  static const c10::OperatorHandle known = operator_named("aten::convolution");
  fallback(known, keys, stack);
}

void convolution_backward(const c10::OperatorHandle&, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  static const c10::OperatorHandle known = operator_named("aten::convolution_backward");
  // The one that is known has the sizes of the bias too, before the last seven arguments.
  int64_t channels = torch::jit::peek(*stack, 0, 10).toTensor().size(1);
  stack->insert(stack->end() - 7, c10::IValue(std::vector<int64_t>{channels}));
  fallback(known, keys, stack);
}

// The CPU has no histogram of integers.
void histc(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  c10::IValue& argument = torch::jit::peek(*stack, 0, 4);
  c10::ScalarType dtype = argument.toTensor().scalar_type();
  argument = argument.toTensor().to(c10::isFloatingType(dtype) ? dtype : at::kDouble);
  fallback(op, keys, stack);
  stack->back() = stack->back().toTensor().to(dtype);
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided_of_torch(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  return empty_strided(size, stride, dtype.value_or(c10::get_default_dtype_as_scalartype()), with_index(device));
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, std::nullopt);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  size_t bytes = static_cast<size_t>(self.storage_offset() + self.numel()) * self.itemsize();
  if (self.storage().nbytes() < bytes) resize_storage(self.storage(), bytes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  size_t last = static_cast<size_t>(offset);
  for (size_t i = 0; i < size.size(); i++) last += static_cast<size_t>((size[i] - 1) * self.stride(static_cast<int64_t>(i)));
  if (self.numel() > 0 && self.storage().nbytes() < (last + 1) * self.itemsize())
    resize_storage(self.storage(), (last + 1) * self.itemsize());
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage source) {
  int64_t size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {size}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage nothing(
      c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_storage(self, std::move(nothing), 0, {0}, {1});
}

// Copies, with the waits of CUDA: pageable memory makes the host wait, pinned memory does not.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (target.numel() == 0) return target;
  std::vector<Access> accesses;
  if (is_ours(source) && is_ours(target)) {
    add_access(accesses, source, false);
    add_access(accesses, target, true);
    Queue& queue = current_queue(source.device().index());
    Queue& other = current_queue(target.device().index());
    if (&queue != &other) stream_waits(queue, mark(other));
    launch("copy_", queue, accesses, [to = alias(target), from = alias(source)] {
      at::AutoDispatchBelowADInplaceOrView inner;
      to.copy_(from);
    });
    if (&queue != &other) stream_waits(other, mark(queue));
    return target;
  }
  bool to_device = is_ours(target);
  const at::Tensor& ours = to_device ? target : source;
  const at::Tensor& host = to_device ? source : target;
  bool pinned = is_pinned(host.storage().data());
  Queue& queue = current_queue(ours.device().index());
  add_access(accesses, ours, to_device);
  // The host's memory may be gone when a late kernel runs; of pinned memory the allocator waits for it.
  at::Tensor bytes = to_device && !pinned ? host.clone() : at::Tensor();
  if (!bytes.defined()) {
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), host.storage().nbytes(),
        c10::DataPtr(const_cast<void*>(host.storage().data()), c10::Device(c10::DeviceType::CPU)), nullptr, false);
    bytes = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), host.dtype());
    bytes.unsafeGetTensorImpl()->set_storage_offset(host.storage_offset());
    bytes.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    if (host.is_conj()) bytes.unsafeGetTensorImpl()->_set_conj(true);
    if (host.is_neg()) bytes.unsafeGetTensorImpl()->_set_neg(true);
  }
  at::Tensor from = to_device ? bytes : alias(source);
  at::Tensor to = to_device ? alias(target) : bytes;
  launch(to_device ? "copy_ from the host" : "copy_ to the host", queue, accesses, [to, from] {
    at::AutoDispatchBelowADInplaceOrView inner;
    to.copy_(from);
  });
  Mark copied = mark(queue);
  if (pinned) keep_pinned(host.storage().data(), copied);
  if (!non_blocking || (!pinned && !to_device))
    host_waits(to_device ? "copy_ from the host" : "copy_ to the host", copied);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (is_ours(target)) resize(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

// The CPU's kernel draws from the CPU's generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) return {input.clone(), at::ones_like(input, at::kBool)};
  at::Tensor kept = at::empty_like(input).bernoulli_(1 - p);
  at::Tensor mask = kept.to(at::kBool);
  return {p == 1 ? kept.mul_(input) : kept.div_(1 - p).mul_(input), mask};
}

at::Tensor native_dropout_backward(const at::Tensor& gradient, const at::Tensor& mask, double scale) {
  return at::mul(gradient, mask.to(gradient.scalar_type())).mul_(scale);
}

void record_stream_of_torch(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// A copy resolves both itself. torch's fallback would clone the source first, by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided_of_torch);
  m.impl("as_strided", as_strided);
  m.impl("view", [](const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); });
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("histc", torch::CppFunction::makeFromBoxedFunction<&histc>());
  // torch would compose these two of others, whose statistics their backward does not take.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("native_dropout", native_dropout);
  m.impl("native_dropout_backward", native_dropout_backward);
  m.impl("record_stream", record_stream_of_torch);
}

}  // namespace

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// A tensor of the CPU over the same bytes, for kernels.
at::Tensor alias(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  c10::Storage bytes(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(for_kernels(storage.data()), c10::Device(c10::DeviceType::CPU)), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(bytes), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  return made;
}

void add_access(std::vector<Access>& all, const at::Tensor& tensor, bool writes) {
  if (tensor.numel() > 0 && tensor.storage().data() != nullptr) all.push_back(access(tensor, writes));
}

void resize_storage(const c10::Storage& storage, size_t size) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::Device device = storage.device();
  c10::DeviceGuard guard(device);
  c10::DataPtr made = device_allocator()->allocate(size);
  size_t kept = std::min(size, impl->nbytes());
  if (kept > 0) {
    std::vector<Access> accesses = {
        {block_of(impl->data_ptr()), 0, kept, false}, {block_of(made), 0, kept, true}};
    void* from = for_kernels(impl->data());
    void* to = for_kernels(made.get());
    launch("resize_", current_queue(device.index()), accesses, [to, from, kept] { std::memcpy(to, from, kept); });
  }
  impl->set_data_ptr_noswap(std::move(made));
  impl->set_nbytes(size);
}

}  // namespace fake
