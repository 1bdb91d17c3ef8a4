"""One unit of sharded parameters: the parameters of a layer, or the rest of a stage, of one dtype.

The state is torch's (``fully_shard``, PyTorch's FSDP2): parameters are DTensors with this rank's rows, and the whole
ones are freed by giving up their memory. What torch does in hooks of modules is called here by the schedule::

    start_gather    begin to gather the parameters              all-gather, in flight
    make_whole      put the whole parameters into the modules
    free            put this rank's rows back
    reduce          add this rank's rows of the gradients       reduce-scatter
"""

import sys
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from nxdpp.counted import counted
from nxdpp.gradients.held_hooks import count_hooks
from nxdpp.gradients.shards.kept_gradients import GRADIENT_DTYPE, KeptGradients, drop_gradient
from nxdpp.ground.torch_names import FSDP_GATHER, FSDP_GROUP, PARAMETERS, STORAGE_ADDRESS, VERSION
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults.waits import Wait


class ShardedUnit:
    """Parameters that are gathered, freed and reduced together; the constructor shards them.

    Args:
        name: for messages.
        parameters: whole ones of one dtype, with values, on ``device``, equal on all ranks of the mesh.
        modules: trees in which the parameters are, under all their names.
        mesh_info: torch's description of the ranks that share them.
        streams: those of this rank's first unit, which all share; ``None`` for the first.
        mp_policy, offload_policy: torch's.
        mean: ``False`` for gradients that are summed over the ranks of the mesh.
        scale: by which gradients are multiplied first.

    Attributes:
        parameters: the sharded ones.
        trains_all: ``True`` if none of them is frozen.
        kept: gradients that stay whole on this replica.
        storages: addresses of the objects that have the memory of the whole parameters, which stay the same.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[nn.Parameter],
        modules: Sequence[nn.Module],
        mesh_info: Any,
        device: torch.device,
        streams: Any,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        mean: bool,
        scale: float = 1.0,
    ) -> None:
        self.name = name
        attributes = [dict(vars(parameter)) for parameter in parameters]
        self._places = _places(parameters, modules)
        group = FSDP_GROUP(list(parameters), tuple(modules), mesh_info, None, device, None, mp_policy, offload_policy)
        self._attributes = attributes
        self._group = group
        targeted = _targeted_by_peft(modules)
        self._unchanging = [
            each for each, places in zip(group.fsdp_params, self._places, strict=True) if targeted.isdisjoint(places)
        ]
        self._ranks: ProcessGroup = mesh_info.shard_process_group
        self._replicas = self._ranks if mesh_info.mesh.ndim == 1 else parallel_state.get_replica_group()
        if streams is None:
            group.comm_ctx.lazy_init(device)
        else:
            group.comm_ctx = streams
        # gloo has no average.
        group.force_sum_reduction_for_comms = True
        group.gradient_divide_factor = None if mean else 1.0
        self._scale = scale
        self.is_trained = self.trains_all = False
        self.storages: frozenset[int] = frozenset()
        self.kept = KeptGradients(name)
        self._programs: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()
        for parameter, own in zip(self.parameters, attributes, strict=True):
            _give(parameter, own)
        self.follow()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's rows, as DTensors."""
        return [each.sharded_param for each in self._group.fsdp_params]

    @property
    def streams(self) -> Any:
        """Streams of the device for gathers and reductions, which the units of a rank share."""
        return self._group.comm_ctx

    @property
    def is_whole(self) -> bool:
        """``True`` while the modules have the whole parameters."""
        return bool(self._group.is_unsharded)

    def check_present(self, present: Collection[int]) -> None:
        """Raise ``RuntimeError`` for a parameter in whose place is none with an id of ``present``, or another kind."""
        for each, ((module, name), *_) in zip(self._group.fsdp_params, self._places, strict=True):
            now = PARAMETERS.of(module).get(name)
            if not isinstance(now, DTensor) or id(now) not in present or now.dtype != each.orig_dtype:
                raise RuntimeError(
                    f"a parameter of {self.name}, of shape {list(each.sharded_param.shape)}, is no longer in the "
                    f"model, or another tensor has its place: fully_shard follows no replacement. Replace modules and "
                    f"parameters before fully_shard."
                )

    def follow(self) -> None:
        """Follow values that were loaded or moved, and parameters that were frozen."""
        group = self._group
        for each in group.fsdp_params:
            each.reset_sharded_param()
        group.lazy_init()
        trained = [each.requires_grad for each in self.parameters]
        self.is_trained, self.trains_all = any(trained), all(trained)
        self._converts = any(each.reduce_dtype is not None for each in group.fsdp_params)

    def add_program(self, program: nn.Module) -> None:
        """Put the parameters into ``program`` too, which has containers of its own, for as long as it is alive."""
        numbers = {id(each): number for number, each in enumerate(self.parameters)}
        known = {id(module) for places in self._places for module, _ in places}
        for module in program.modules():
            names = {name: numbers[id(each)] for name, each in PARAMETERS.of(module).items() if id(each) in numbers}
            if names and id(module) not in known:
                self._programs[module] = names

    def start_gather(self) -> None:
        """Begin to gather the parameters, unless they are whole or on their way; collective over the mesh."""
        with Wait("gather of parameters", self._ranks):
            self._group.unshard(async_op=True)

    def make_whole(self) -> None:
        """Put the whole parameters into the modules, once they have arrived."""
        if self._group.is_unsharded:
            return
        self.start_gather()
        is_first = not hasattr(self._group.fsdp_params[0], "unsharded_param")
        with Wait("gather of parameters", self._ranks):
            self._group.wait_for_unshard()
        if is_first:
            self.storages = frozenset(
                STORAGE_ADDRESS.of(each.unsharded_param.untyped_storage()) for each in self._group.fsdp_params
            )
            for each, own in zip(self._group.fsdp_params, self._attributes, strict=True):
                _give(each.unsharded_param, own | {"gathered_for_a_step": True})
        self._put_into_programs([each.unsharded_param for each in self._group.fsdp_params])
        self._versions = [VERSION.of(each.unsharded_param) for each in self._unchanging]

    def free(self) -> None:
        """Put this rank's rows back, and free the whole parameters; their gradients stay.

        Raises ``RuntimeError`` for a parameter that forward has changed in place: the change would be lost.
        """
        if not self._group.is_unsharded:
            return
        for each, version in zip(self._unchanging, self._versions, strict=True):
            if VERSION.of(each.unsharded_param) != version:
                raise RuntimeError(
                    f"a forward of {self.name} has changed a parameter of shape {list(each.unsharded_param.shape)} in "
                    f"place (nn.Embedding(max_norm=...) does), and a sharded parameter loses such a change: change it "
                    f"between steps, or leave fully_shard out."
                )
        self._group.reshard()
        self._put_into_programs(self.parameters)

    def _put_into_programs(self, parameters: Sequence[nn.Parameter]) -> None:
        for module, names in self._programs.items():
            PARAMETERS.of(module).update({name: parameters[number] for name, number in names.items()})

    def whole_trained(self) -> list[nn.Parameter]:
        """Return the whole parameters whose gradients autograd accumulates."""
        return [each.unsharded_param for each in self._group.fsdp_params if each.unsharded_param.requires_grad]

    def convert(self) -> None:
        """Add up the gradients of the microbatches so far in the policy's ``reduce_dtype``."""
        if self._converts:
            for each in self._group.fsdp_params:
                _convert(each)

    def convert_each(self) -> list[RemovableHandle]:
        """Convert each gradient once a backward has made it, so that few exist in both dtypes; return the hooks."""
        trained = [each for each in self._group.fsdp_params if self._converts and each.unsharded_param.requires_grad]
        return [each.unsharded_param.register_post_accumulate_grad_hook(partial(_convert, each)) for each in trained]

    def reduce(self) -> list[bool]:
        """Reduce the gradients over the mesh, and add this rank's rows to ``.grad`` of the parameters; collective.

        A missing gradient counts as zeros. Returns for each trained parameter whether this rank had one. The whole
        parameters are freed with ``free``. Raises ``RuntimeError`` for hooks of a gradient, which would not run.
        """
        present = []
        for each in self._group.fsdp_params:
            if not each.sharded_param.requires_grad:
                continue
            if count_hooks(each.sharded_param):
                raise RuntimeError(
                    f"a gradient of {self.name}, of shape {list(each.sharded_param.shape)}, has a hook, which would "
                    f"not see it: fully_shard reduces whole gradients to rows. Change .grad after run_train instead."
                )
            whole = each.unsharded_param
            has_one = whole.grad is not None or each.unsharded_accumulated_grad is not None
            if not has_one:
                whole.grad = torch.zeros_like(whole, dtype=getattr(each, GRADIENT_DTYPE, None))
            present.append(has_one)
        if any(each.unsharded_accumulated_grad is not None for each in self._group.fsdp_params):
            # One message has one dtype.
            for each in self._group.fsdp_params:
                _convert(each)
        if self._scale != 1.0:
            # torch's own factor counts twice where one rank has all rows.
            for each in self._group.fsdp_params:
                _multiply(each, self._scale)
        group = self._group
        group.reshard_after_backward = False
        with Wait("reduction of gradients", self._replicas):
            group.post_backward()
        return present

    def mark_kept(self) -> None:
        """Note the parameters whose gradients stay whole on this replica."""
        self.kept.mark(self._group.fsdp_params)

    def check_reduced(self, remedy: str) -> None:
        """Raise ``RuntimeError`` for a gradient that came after ``reduce``: it would count in a later step."""
        late = [each for each in self.whole_trained() if each.grad is not None]
        if late:
            raise RuntimeError(
                f"{counted(len(late), 'gradient')} of {self.name}, the first of shape {list(late[0].shape)}, came "
                f"after its turn in the backward: {remedy}"
            )

    def finish(self) -> None:
        """Wait for the reductions on the device, and free their messages."""
        self._group.finalize_backward()
        context = self.streams
        # torch's root module does it, which no stage calls. torch 2.9 has one state.
        has_many = hasattr(context, "reduce_scatter_states")
        for state in context.reduce_scatter_states if has_many else [context.reduce_scatter_state]:
            if state is not None and state.event is not None:
                self._group.device_handle.current_stream().wait_event(state.event)
        if has_many:
            context.reduce_scatter_states.clear()
        else:
            context.reduce_scatter_state = None

    def abandon(self, drops: bool) -> None:
        """Put this rank's rows back after a step that has failed; ``drops`` the whole gradients too."""
        # The other replicas may never reach a gather that is on its way.
        if FSDP_GATHER.of(self._group) is not None:
            FSDP_GATHER.set(self._group, None)
        self._group.finalize_backward()
        for each in self._group.fsdp_params if drops else ():
            drop_gradient(each)
        self._group.reshard()
        self._put_into_programs(self.parameters)


def _convert(parameter: Any, gradient_of: torch.Tensor | None = None) -> None:
    if not hasattr(parameter, GRADIENT_DTYPE):
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()


def _multiply(parameter: Any, factor: float) -> None:
    """Multiply the whole gradients of ``parameter``, of which ``.grad`` may be memory of the program."""
    whole = parameter.unsharded_param
    whole.grad = None if whole.grad is None else whole.grad * factor
    if parameter.unsharded_accumulated_grad is not None:
        parameter.unsharded_accumulated_grad.mul_(factor)


def _places(parameters: Sequence[nn.Parameter], roots: Sequence[nn.Module]) -> list[list[tuple[nn.Module, str]]]:
    """Return the modules below ``roots`` that have each of ``parameters``, with its name there."""
    found: dict[int, list[tuple[nn.Module, str]]] = {id(parameter): [] for parameter in parameters}
    for module in dict.fromkeys(module for root in roots for module in root.modules()):
        for name, parameter in PARAMETERS.of(module).items():
            found.get(id(parameter), []).append((module, name))
    return list(found.values())


def _targeted_by_peft(roots: Sequence[nn.Module]) -> set[tuple[nn.Module, str]]:
    """Return the modules and names of parameters to which ``LoraConfig(target_parameters=...)`` adds adapters.

    PEFT registers a parametrization in each forward. torch then sets the parameter to itself, which counts as a change
    in place, and the module reads the sum with the adapters: its code cannot change the parameter.
    """
    lora = sys.modules.get("peft.tuners.lora")
    wrappers = [each for root in roots for each in root.modules() if lora and isinstance(each, lora.ParamWrapper)]
    return {(wrapper.get_base_layer(), wrapper.parameter_name) for wrapper in wrappers}


def _give(parameter: nn.Parameter, attributes: dict[str, Any]) -> None:
    """Give ``parameter`` the attributes that the parameter in its place had, such as the ones of tensor parallelism."""
    vars(parameter).update(attributes)
