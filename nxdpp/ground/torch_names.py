"""Private names of torch, by what nxdpp does with them. A use follows the word nxdpp in a message."""

from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nxdpp.ground.names import PrivateAttribute, PrivateName

__all__ = ["TorchDispatchMode", "pytree"]

# What everything needs. Code imports these two from here, since they are modules and base classes.
PYTREE = PrivateName(
    "torch.utils._pytree", "takes containers of tensors apart, as torch and transformers register them"
)
DISPATCH_MODE = PrivateName("torch.utils._python_dispatch.TorchDispatchMode", "follows the operations of a block")

# The registries of a module.
PARAMETERS = PrivateAttribute("torch.nn.Module._parameters", "follows which parameters a module registers itself")
BUFFERS = PrivateAttribute("torch.nn.Module._buffers", "follows which buffers a module registers itself")
MODULES = PrivateAttribute("torch.nn.Module._modules", "replaces modules of other ranks by empty ones")
NON_PERSISTENT = PrivateAttribute(
    "torch.nn.Module._non_persistent_buffers_set", "leaves out of a checkpoint the buffers that torch leaves out"
)
COMPILED_CALL = PrivateAttribute("torch.nn.Module._compiled_call_impl", "runs what module.compile() has compiled")

# The hooks of a module.
FORWARD_HOOKS = PrivateAttribute("torch.nn.Module._forward_hooks", "finds hooks that a stage has to run or refuse")
FORWARD_PRE_HOOKS = PrivateAttribute(
    "torch.nn.Module._forward_pre_hooks", "finds hooks that a stage has to run or refuse"
)
BACKWARD_HOOKS = PrivateAttribute(
    "torch.nn.Module._backward_hooks", "finds hooks of modules and tensors that a stage has to run or refuse"
)
BACKWARD_PRE_HOOKS = PrivateAttribute("torch.nn.Module._backward_pre_hooks", "finds hooks that a stage has to refuse")

# Tensors and their memory.
VERSION = PrivateAttribute("torch.Tensor._version", "sees that a tensor was changed in place")
STORAGE_ADDRESS = PrivateAttribute("torch.UntypedStorage._cdata", "finds tensors that share memory, on any device")
