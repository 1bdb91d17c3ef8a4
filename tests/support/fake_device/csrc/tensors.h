// Tensors of the fake device, as kernels see them.
#pragma once

#include <ATen/core/Tensor.h>

#include "fake.h"

namespace fake {

bool is_ours(const at::Tensor& tensor);
// A tensor of the CPU over the same bytes, for kernels. It does not keep the memory.
at::Tensor alias(const at::Tensor& tensor);
// Notes that a kernel touches a tensor's bytes, from its first element to its last one.
void add_access(std::vector<Access>& all, const at::Tensor& tensor, bool writes);

}  // namespace fake
