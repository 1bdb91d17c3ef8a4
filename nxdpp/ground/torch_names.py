"""Private names of torch, by what nxdpp does with them. A use follows the word nxdpp in a message."""

from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nxdpp.ground.names import NeededAttribute, PrivateAttribute, PrivateName

__all__ = ["TorchDispatchMode", "pytree"]

# What everything needs. Code imports these two from here, since they are modules and base classes.
PYTREE = PrivateName(
    "torch.utils._pytree", "takes containers of tensors apart, as torch and transformers register them"
)
DISPATCH_MODE = PrivateName("torch.utils._python_dispatch.TorchDispatchMode", "follows the operations of a block")

# The registries of a module.
PARAMETERS = NeededAttribute("torch.nn.Module._parameters", "follows which parameters a module registers itself")
BUFFERS = NeededAttribute("torch.nn.Module._buffers", "follows which buffers a module registers itself")
MODULES = NeededAttribute("torch.nn.Module._modules", "replaces modules of other ranks by empty ones")
NON_PERSISTENT = PrivateAttribute(
    "torch.nn.Module._non_persistent_buffers_set", "leaves out of a checkpoint the buffers that torch leaves out"
)
COMPILED_CALL = NeededAttribute("torch.nn.Module._compiled_call_impl", "runs what module.compile() has compiled")

REGISTRIES = (PARAMETERS.name, BUFFERS.name, MODULES.name)
RESET = PrivateAttribute("torch.nn.MultiheadAttention._reset_parameters", "initialises torch's attention")
CALL_WITH_HOOKS = PrivateAttribute("torch.nn.Module._call_impl", "runs a module of generate with its hooks")

MOVE = PrivateAttribute("torch.nn.Module._apply", "follows moves and conversions of a model")
LOAD_OWN = PrivateAttribute("torch.nn.Module._load_from_state_dict", "leaves modules to loaders of their own")
LOAD_PRE_HOOKS = PrivateAttribute(
    "torch.nn.Module._load_state_dict_pre_hooks", "checks a state dict before it is loaded"
)
STATE_VERSIONS = PrivateAttribute("torch.nn.Module.state_dict._metadata", "keeps the versions of modules in a state")

# The hooks of a module.
FORWARD_HOOKS = NeededAttribute("torch.nn.Module._forward_hooks", "finds hooks that a stage has to run or refuse")
FORWARD_PRE_HOOKS = NeededAttribute(
    "torch.nn.Module._forward_pre_hooks", "finds hooks that a stage has to run or refuse"
)
BACKWARD_HOOKS = NeededAttribute(
    "torch.nn.Module._backward_hooks", "finds hooks of modules and tensors that a stage has to run or refuse"
)
BACKWARD_PRE_HOOKS = NeededAttribute("torch.nn.Module._backward_pre_hooks", "finds hooks that a stage has to refuse")

# Tensors and their memory.
VERSION = NeededAttribute("torch.Tensor._version", "sees that a tensor was changed in place")
STORAGE_ADDRESS = NeededAttribute("torch.UntypedStorage._cdata", "finds tensors that share memory, on any device")
BASE = PrivateAttribute("torch.Tensor._base", "follows what a loss function computes from a view that it changes")
HOOKS = (FORWARD_HOOKS, FORWARD_PRE_HOOKS, BACKWARD_HOOKS, BACKWARD_PRE_HOOKS)
STORAGE_USES = PrivateName("torch._C._storage_Use_Count", "sees whether another tensor has the memory of a gradient")
POST_ACCUMULATE_HOOKS = PrivateAttribute(
    "torch.Tensor._post_accumulate_grad_hooks", "runs hooks of a gradient when the gradient of a step is whole"
)

# Backwards.
ENGINE = PrivateName("torch.autograd.Variable._execution_engine", "runs backwards, and sees whether one is running")
SEQUENCE_NUMBER = PrivateAttribute(
    "torch.autograd.graph.Node._sequence_nr", "keeps the order of autograd in a backward of two parts"
)
# torch's notes on autograd describe these two beginnings of names.
SAVED = PrivateAttribute("torch.autograd.graph.Node._saved_", "counts the memory that a node of a backward keeps")
RAW_SAVED = PrivateAttribute("torch.autograd.graph.Node._raw_saved_", "finds what a backward of two parts can free")
SAVED_TENSOR = PrivateName("torch._C._autograd.SavedTensor", "finds what a backward of two parts can free")
_OF_STATE = "gives a recomputation the state of its forward"
CHECKPOINT_GENERATOR = PrivateName("torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl", _OF_STATE)
if not CHECKPOINT_GENERATOR.exists:
    # Before torch 2.14.
    CHECKPOINT_GENERATOR = PrivateName("torch.utils.checkpoint._checkpoint_without_reentrant_generator", _OF_STATE)

# Modes.
NO_TORCH_FUNCTION = PrivateName("torch._C.DisableTorchFunction", "asks a tensor of deferred_init what torch knows")
NO_DISPATCH_MODES = PrivateName(
    "torch.utils._python_dispatch._disable_current_modes", "computes with values inside of deferred_init"
)
SCHEMA = PrivateAttribute("torch._ops.OpOverload._schema", "knows which arguments an operation of torch writes")
DEFAULT_DEVICE = PrivateName(
    "torch.utils._device", "sees the device of set_default_device where torch has put its mode away"
)
CAUSAL_MASK = PrivateName(
    "torch.nn.modules.transformer._detect_is_causal_mask", "compares a mask of nn.TransformerEncoder in every step"
)
FUNCTIONAL_CALL = PrivateName(
    "torch.nn.utils.stateless._functional_call", "refuses functional_call with other weights outside layers"
)
CHECK_WITH = PrivateName("torch._check_with", "runs torch._check of code outside layers in every step")
ASSERT = PrivateName("torch._assert", "divides the rows of a check as those of its argument")
ASSERT_ASYNC = PrivateName("torch._assert_async", ASSERT.use)
FAKE_MODE = PrivateName("torch._subclasses.fake_tensor.FakeTensorMode", "computes shapes without values")

# Files.
FILE_OFFSET = PrivateAttribute("torch.UntypedStorage._checkpoint_offset", "reads a part of a file of torch.save")
STORAGE_INFO = PrivateName(
    "torch.distributed.checkpoint.filesystem._StorageInfo", 'writes the places of values for format="dcp"'
)

EXTRA_STATE = PrivateAttribute("torch.nn.Module.state_dict._extra_state", "tells extra state of a module from tensors")
MEMORY_FORMATS = PrivateName("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING", 'reads format="dcp"')
LAYOUT = PrivateName("torch.serialization._get_layout", 'reads format="dcp"')

# Operations that torch's FlopCounterMode does not know.
GROUPED_PRODUCT = PrivateName("torch.ops.aten._grouped_mm", "counts the FLOPs of experts")
CPU_ATTENTION = PrivateName(
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", "counts the FLOPs of attention on the CPU"
)
CPU_ATTENTION_BACKWARD = PrivateName(
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", "counts the FLOPs of attention on the CPU"
)

# Ranks.
DEFAULT_STORE = PrivateName(
    "torch.distributed.distributed_c10d._get_default_store", "exchanges settings in a world that the program started"
)
CLEAR_SHARDING_CACHE = PrivateName(
    "torch.distributed.tensor.debug._clear_sharding_prop_cache", "makes shards of other groups of the same ranks"
)
if not CLEAR_SHARDING_CACHE.exists:
    # In torch 2.9.
    CLEAR_SHARDING_CACHE = PrivateName(
        "torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear",
        CLEAR_SHARDING_CACHE.use,
    )
COMPILER = PrivateName("torch._dynamo.callback.callback_handler", "gives a compilation a limit of its own")
COMPILATIONS = PrivateAttribute(
    "torch._dynamo.callback.CompilationCallbackHandler._CompilationCallbackHandler__pending_callbacks_counter",
    "gives a compilation a limit of its own",
)

LAST_RATES = PrivateAttribute("torch.optim.lr_scheduler.LRScheduler._last_lr", "saves rates by parameter group")
SCHEDULERS = PrivateAttribute("torch.optim.lr_scheduler.SequentialLR._schedulers", LAST_RATES.use)

# Gradients.
GROUP_GRADIENTS = PrivateName(
    "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype", "refuses torch's norm of a part of the gradients"
)
SCALED_STEP = PrivateAttribute(
    "torch.optim.Adam._step_supports_amp_scaling", "refuses torch's scaler in an optimizer over ranks"
)
UNSCALE = PrivateAttribute("torch.amp.GradScaler._unscale_grads_", "finds overflows of all ranks")

REPLICATED_BY_TORCH = PrivateAttribute(
    "torch.nn.Module._ddp_params_and_buffers_to_ignore", "keeps DistributedDataParallel off parts of a model"
)

# Shards of parameters, by the classes of torch's fully_shard.
FSDP_GROUP = PrivateName(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup", "shards parameters over replicas"
)
FSDP_MESH = PrivateName(
    "torch.distributed.fsdp._fully_shard._fsdp_common.FSDPMeshInfo", "shards parameters over replicas"
)
HSDP_MESH = PrivateName(
    "torch.distributed.fsdp._fully_shard._fsdp_common.HSDPMeshInfo", "shards over some of the replicas"
)
FSDP_GATHER = PrivateAttribute(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._all_gather_result",
    "drops a gather of a step that has failed",
)
FSDP_MANAGED = PrivateAttribute("torch.nn.Module._is_fsdp_managed_module", "refuses modules inside torch's FSDP")

# Collectives and compilation.
COLLECTIVES = PrivateName("torch.ops._c10d_functional", "starts collectives of tensor-parallel layers")
GROUP_OF_NAME = PrivateName(
    "torch.distributed.distributed_c10d._resolve_process_group", "compiles collectives of tensor-parallel layers"
)
KEEP_ORDER = PrivateName(
    "torch._higher_order_ops.effects._register_effectful_op", "keeps the order of collectives in compiled layers"
)
EFFECT = PrivateName("torch._higher_order_ops.effects._EffectType", "keeps the order of collectives in compiled layers")
DYNAMO_MARKS = PrivateAttribute("torch.Tensor._dynamo", "lets the compiler mark tensors: names that begin so")
DYNAMO_CONFIG = PrivateName("torch._dynamo.config", "compiles all layers of a rank")
INDUCTOR_CONFIG = PrivateName("torch._inductor.config", "refuses CUDA graphs of compiled layers")
INDUCTOR_MODE = PrivateName("torch._inductor.list_mode_options", "refuses CUDA graphs of compiled layers")
WITHOUT_MEMORY = PrivateName(
    "torch.Tensor._make_wrapper_subclass", "passes shapes to stages that use nothing else of a value"
)
