"""Shards of a wrapped model over its data-parallel replicas: ``fully_shard`` of PyTorch's FSDP2, inside the stages.

::

    model = NxDPPModel(module, num_microbatches=8)         also from deferred_init or on the meta device
    nxdpp.fully_shard(model)                               each layer, and the rest of each stage
    optimizer = torch.optim.AdamW(model.local_parameters())
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from nxdpp.devices.kinds import device_of
from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.held_hooks import count_hooks
from nxdpp.gradients.replaced_parameters import check_no_optimizer_holds, watch_replaced
from nxdpp.gradients.shards.each_microbatch import EachMicrobatch
from nxdpp.gradients.shards.local_tensors import is_sharded
from nxdpp.gradients.shards.once_a_step import OnceAStep
from nxdpp.gradients.shards.rank_shards import RankShards, ShardedLayer, StageShards
from nxdpp.gradients.shards.unit import ShardedUnit
from nxdpp.ground.torch_names import FSDP_MESH, HSDP_MESH, pytree
from nxdpp.initialization.allocation import with_type_of
from nxdpp.pipeline.layer_compilation import compiled_modules
from nxdpp.pipeline.local.changes import TENSORS, Change
from nxdpp.pipeline.model import NxDPPModel
from nxdpp.pipeline.steps import Steps
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board
from nxdpp.tracing.modules import listings


def fully_shard(
    model: nn.Module,
    *,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
) -> nn.Module:
    """Keep of each parameter, gradient and optimizer state only this replica's rows; collective over all ranks.

    Each transformer layer is a unit, and so is the rest of each stage. Parameters become DTensors under their original
    names, with dimension 0 divided over the data-parallel ranks, or over ``data_parallel_shard_size`` of them. Any
    optimizer of torch that takes DTensors steps its rows. Experts of ``expert_parallelize`` are divided over the ranks
    with the same experts. A model without values gets its initial weights here, a unit at a time. Parameters without
    dimensions, and of tensor subclasses such as 4-bit weights, stay as they are.

    Args:
        model: the wrapped model (``NxDPPModel``), or the model of ``initialize_parallel_model``.
        reshard_after_forward: ``None`` and ``False`` gather a unit before its first forward of a step, free it after
            its last backward, and reduce its gradients once, in that backward. Weights and gradients are then whole
            within a step. ``True`` gathers a unit for each forward and each backward of a microbatch, frees it after
            them, and reduces its gradients each time.
        mp_policy: torch's. Parameters are gathered in ``param_dtype``, and gradients add up and are reduced in
            ``reduce_dtype``; the optimizer has the original dtype. Layers, and other modules with parameters, get their
            floating inputs in ``param_dtype``, and return ``output_dtype``.
        offload_policy: torch's; ``CPUOffloadPolicy()`` keeps rows, gradients and optimizer state in host memory.

    Returns:
        ``model``.

    Raises:
        TypeError: for a model that is not wrapped.
        ValueError: for an argument, a device or a setting of the model that cannot be honoured.
        RuntimeError: for a second call, for an optimizer that holds a parameter, and for replicas with different
            values. Nothing is changed then.

    After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv 1910.02054),
    and Zhao et al., "PyTorch FSDP" (arXiv 2304.11277).
    """
    wrapped = model if isinstance(model, NxDPPModel) else getattr(model, "pipelined", None)
    if not isinstance(wrapped, NxDPPModel):
        raise TypeError(
            f"fully_shard takes a wrapped model, not a {type(model).__name__}: call it after NxDPPModel(module, ...), "
            f"and before the optimizer is made. A model of one stage is wrapped too."
        )
    mp_policy, offload_policy = mp_policy or MixedPrecisionPolicy(), offload_policy or OffloadPolicy()
    _check(reshard_after_forward, offload_policy)
    _check_settings(wrapped)
    with board.call("fully_shard"), failure_watch.reported():
        shards = _Sharding(wrapped.steps, mp_policy, offload_policy).shards(bool(reshard_after_forward))
        _cast(wrapped, mp_policy)
        wrapped.steps.shard(shards)
    return model


class _Sharding:
    """The units that ``fully_shard`` makes of a model's part on this rank."""

    def __init__(self, steps: Steps, mp_policy: MixedPrecisionPolicy, offload_policy: OffloadPolicy) -> None:
        self._steps, self._part = steps, steps.part
        self._tree, self._root = steps.part.module, steps.part.root
        self._policies = mp_policy, offload_policy
        self._device = parallel_state.local_device()
        self._streams: Any = None
        mesh = parallel_state.get_shard_mesh()
        self._mesh_info = FSDP_MESH(mesh, 0) if mesh.ndim == 1 else HSDP_MESH(mesh, 1, 0)

    def shards(self, resharding: bool) -> RankShards:
        """Make the units, one after the other."""
        named = {name: each for name, each in listings.named_parameters(self._tree) if _can_shard(each)}
        check_no_optimizer_holds(named, "Make the optimizer after fully_shard(model).")
        hooked = [name for name, parameter in named.items() if count_hooks(parameter)]
        if hooked:
            raise ValueError(
                f"{hooked[0]} has a hook of its gradient, which would not see it: fully_shard reduces whole gradients "
                f"to rows. Remove the hook, and change .grad after run_train."
            )
        self._steps.replicas.check_values()
        partition = self._steps.partition
        local = self._steps.local_stages
        # Find the place of each parameter: a layer, or the rest of the stages that use it.
        everywhere = {name: id(p) for name, p in self._tree.named_parameters(remove_duplicate=False)}
        used_by = {stage: {everywhere.get(name) for name in partition.parameters_of(stage)} for stage in local}
        layers = {name: self._tree.get_submodule(name) for name in partition.layers_of(local)}
        inside = {name: set(map(id, listings.parameters(layer))) for name, layer in layers.items()}
        places: dict[str | tuple[int, ...], list[str]] = {name: [] for name in layers}
        for name, parameter in named.items():
            stages = tuple(stage for stage in local if id(parameter) in used_by[stage]) or (local[0],)
            holding = [layer for layer, ids in inside.items() if id(parameter) in ids]
            place = holding[0] if len(holding) == len(stages) == 1 else stages
            places.setdefault(place, []).append(name)
        # Shard, and give each stage its units.
        kept = self._part.compared.kept()
        units = {place: self._units(place, names) for place, names in places.items()}
        self._part.compared.hold(kept)
        stages_shards = {
            stage: StageShards(
                [ShardedLayer(layers[name], units[name]) for name in partition.layers_of([stage])],
                [unit for place in places if isinstance(place, tuple) and stage in place for unit in units[place]],
            )
            for stage in local
        }
        watch = self._part.changes.watch(*TENSORS, Change.GRADIENT)
        return (EachMicrobatch if resharding else OnceAStep)(stages_shards, self._steps.exchanges, watch, self._tree)

    def _units(self, place: str | tuple[int, ...], names: Sequence[str]) -> list[ShardedUnit]:
        """Shard the parameters ``names``: a unit for each dtype, and one for experts that ranks share."""
        named = [(name, self._tree.get_parameter(name)) for name in names]
        values = self._with_values([parameter for _, parameter in named])
        what = place if isinstance(place, str) else f"the rest of stage {' and '.join(map(str, place))}"
        alike: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
        for parameter in values:
            alike.setdefault((parameter.dtype, is_of_experts(parameter)), []).append(parameter)
        mean = self._steps.config.gradient_reduction == "mean"
        trees = [self._tree, self._root]
        made = []
        for (_, of_experts), own in alike.items():
            ranks = FSDP_MESH(parallel_state.get_expert_shard_mesh(), 0) if of_experts else self._mesh_info
            # Gradients of experts are the mean over the ranks of an expert group already.
            scale = 1 if mean or not of_experts else parallel_state.get_expert_model_parallel_size()
            unit = ShardedUnit(what, own, trees, ranks, self._device, self._streams, *self._policies, mean, scale)
            self._streams = unit.streams
            made.append(unit)
        watch_replaced(dict(named))
        return made

    def _with_values(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Give ``parameters`` values, memory on this rank's device and rows that follow each other; in both trees."""
        made = self._part.initial.of_tensors([each for each in parameters if each.is_meta])
        initial = iter(made)
        new = []
        for old in parameters:
            value = (next(initial) if old.is_meta else old).detach().to(self._device).contiguous()
            moved = with_type_of(value, old)
            assert isinstance(moved, nn.Parameter)
            new.append(moved)
            if old.requires_grad and not old.is_meta:
                old.register_hook(_refuse_gradient)
        self._part.replace_tensors(parameters, new)
        return new


def _cast(wrapped: NxDPPModel[bool, bool], policy: MixedPrecisionPolicy) -> None:
    """Cast the floating inputs and outputs of each module that a stage calls, as ``policy`` says."""
    inputs = policy.param_dtype if policy.cast_forward_inputs else None
    for _, module in compiled_modules(wrapped.local_named_children()):
        if inputs is not None:
            module.register_forward_pre_hook(partial(_cast_inputs, inputs), with_kwargs=True)
        if policy.output_dtype is not None:
            module.register_forward_hook(partial(_cast_output, policy.output_dtype))


def _cast_inputs(dtype: torch.dtype, module: nn.Module, arguments: Any, keywords: Any) -> Any:
    return pytree.tree_map(partial(_to, dtype), (arguments, keywords))


def _cast_output(dtype: torch.dtype, module: nn.Module, arguments: Any, output: Any) -> Any:
    return pytree.tree_map(partial(_to, dtype), output)


def _to(dtype: torch.dtype, leaf: Any) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _check(reshard_after_forward: object, offload_policy: OffloadPolicy) -> None:
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward!r} must be None, True or False: parameters are divided over "
            f"all ranks of a shard group at all times. data_parallel_shard_size of initialize_model_parallel divides "
            f"them over fewer ranks."
        )
    device = parallel_state.local_device()
    if device_of(device).is_lazy:
        raise ValueError(
            "fully_shard is for the CPU and CUDA: give an XLA device use_zero1_optimizer=True in its place."
        )
    if isinstance(offload_policy, CPUOffloadPolicy) and device.type == "cpu" and offload_policy.pin_memory:
        raise ValueError(
            "CPUOffloadPolicy() pins memory for a CUDA device, and this rank computes on the CPU, where its rows are "
            "in host memory anyway: leave offload_policy out."
        )


def _check_settings(model: NxDPPModel[bool, bool]) -> None:
    config = model.steps.config
    if model.part.shards is not None:
        raise RuntimeError("fully_shard was called for this model already: call it once.")
    experts = any(map(is_of_experts, model.part.root.parameters()))
    excluded = {
        "use_zero1_optimizer=True (zero_one_enabled of NxD's trainer, and its models on one pipeline rank), with which "
        "the optimizer reduces gradients": config.use_zero1_optimizer,
        "data_parallel_shard_size next to expert_parallelize, which has replicas of its own": (
            experts and parallel_state.get_shard_mesh().ndim > 1
        ),
        "check_against_module, which compares whole gradients": config.check_against_module is not None,
    }
    for what, is_set in excluded.items():
        if is_set:
            raise ValueError(
                f"fully_shard does not go with {what}: wrap the model without it, a model on one pipeline rank by "
                f"NxDPPModel(module)."
            )


def _refuse_gradient(gradient: torch.Tensor) -> None:
    raise RuntimeError(
        f"a parameter of shape {list(gradient.shape)} has a gradient, and fully_shard has put another in its place: a "
        f"module uses it by a reference of its own, such as a list. Read it from the module that has it."
    )


def _can_shard(parameter: nn.Parameter) -> bool:
    """Return whether torch can divide ``parameter``: it has rows, and is no tensor of a subclass."""
    return parameter.ndim > 0 and type(parameter) is nn.Parameter and not is_sharded(parameter)
