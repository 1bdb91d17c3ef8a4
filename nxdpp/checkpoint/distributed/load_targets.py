"""Memory of this rank that a load reads into, and the state that it then gives to the objects of a training.

::

    prepare      verifies that model, optimizer, scheduler and scaler fit ─▶ tensors to read, acts that follow
    take_over    does the acts, once all ranks have read
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from nxdpp.checkpoint.distributed.captured import layout, set_random_state
from nxdpp.checkpoint.distributed.document import Document, tensors_of
from nxdpp.checkpoint.distributed.document_checks import part_of
from nxdpp.checkpoint.distributed.model_state import ModelTensors, is_pipelined
from nxdpp.checkpoint.distributed.optimizer_state import held_state, is_stepped, not_sharded
from nxdpp.checkpoint.distributed.optimizers import Optimizers, SavedOptimizer, fitting, saved_optimizers
from nxdpp.checkpoint.distributed.parameter_groups import check_options, new_options, places_of
from nxdpp.checkpoint.distributed.rectangles import TensorBlocks, blocks_of, placement_of, whole
from nxdpp.checkpoint.distributed.schedulers import NamedSchedulers, check_rates, each_of, is_of, placed_state
from nxdpp.checkpoint.distributed.structured import decoded
from nxdpp.checkpoint.files.pieces import listed
from nxdpp.checkpoint.huggingface.model_tensors import WrappedModel
from nxdpp.devices.kinds import readable
from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.optimizer.partial_steps import mark_loaded
from nxdpp.gradients.replaced_parameters import check_no_optimizer_holds
from nxdpp.gradients.shards.local_tensors import is_sharded, local_rows
from nxdpp.initialization.allocation import with_type_of
from nxdpp.initialization.tape import overlaps_itself
from nxdpp.ranks.exchange import Exchange


class LoadArguments(NamedTuple):
    """The objects of a training that a checkpoint is loaded into; ``optimizers`` may be empty."""

    model: nn.Module | None
    optimizers: Optimizers
    scheduler: Stateful | None
    grad_scaler: Stateful | None
    strict: bool


class LoadTargets:
    """The tensors that this rank reads, by name, and the acts that follow; not collective. ``folder`` is for messages.

    ``tensors`` are rectangles in memory of this rank, by the names of the checkpoint. Some are read ``in_new_memory``,
    which nothing uses before ``take_over``. All data-parallel replicas need the ones in ``of_replicas``. Tensors in
    ``user_content`` get their values by the read.
    """

    def __init__(self, folder: Path, document: Document) -> None:
        self._folder = folder
        self._content = document.content
        self._saved = tensors_of(document.metadata)
        self.tensors: dict[str, TensorBlocks] = {}
        self.of_replicas: set[str] = set()
        self.user_content: Any = None
        self._made: dict[str, torch.Tensor] = {}
        self.in_new_memory: set[str] = set()
        self._host_copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copies: list[tuple[TensorBlocks, TensorBlocks]] = []
        self._after: list[Callable[[], Any]] = []

    def prepare(self, given: LoadArguments, tensors: ModelTensors | None) -> None:
        """Verify that the checkpoint fits ``given``, whose model has ``tensors``, before anything is changed.

        Raises ``ValueError`` for names, shapes, dtypes or groups that do not fit.
        """
        if tensors is not None:
            assert given.model is not None
            self._add_model(given.model, tensors, given.strict)
        places: dict[str, list[list[int]]] = {}
        if given.optimizers:
            if tensors is None:
                raise ValueError("an optimizer is loaded with the model whose parameters it has: give model= too.")
            saved = fitting(given.optimizers, saved_optimizers(self._content["optimizer"]), self._folder)
            for name, optimizer in given.optimizers.items():
                places[name] = self._add_optimizer(optimizer, saved[name], tensors.names(), given.strict)
        for name, one in (("scheduler", given.scheduler), ("grad_scaler", given.grad_scaler)):
            if one is None:
                continue
            if self._content[name] is None:
                raise ValueError(f"{self._folder} has no {name}: leave out {name}=.")
            self._add_made(name)
            state = decoded(self._content[name], self._made)
            if isinstance(one, NamedSchedulers):
                one.check_names(state, self._folder)
            if name == "scheduler":
                state = self._placed(one, state, given.optimizers, places)
            self._after.append(partial(one.load_state_dict, state))
        self._add_made("user_content")
        # Tensors in it get their values later.
        self.user_content = decoded(self._content["user_content"], self._made)
        self._add_random(given.model)

    def take_over(self) -> None:
        """Give the objects their state, once all ranks have read."""
        for first, other in self._copies:
            for source, destination in zip(first.blocks, other.blocks, strict=True):
                destination.values.copy_(source.values)
        with torch.no_grad():
            for tensor, values in self._host_copies:
                tensor.copy_(values)
        for act in self._after:
            act()

    def _placed(
        self, scheduler: Stateful, state: Any, optimizers: Optimizers, places: Mapping[str, list[list[int]]]
    ) -> Any:
        """``state``, with its values of groups in the order of the groups of ``optimizers``."""
        saved = saved_optimizers(self._content["optimizer"])
        for path, one in each_of(scheduler).items():
            of_one = state[path[0]] if path else state
            for name, place in places.items():
                if is_of(one, optimizers[name]):
                    of_one = placed_state(one, of_one, place, len(saved[name if name in saved else ""].groups))
            check_rates(one, of_one, self._folder)
            state = {**state, path[0]: of_one} if path else of_one
        return state

    def _add_model(self, model: nn.Module, tensors: ModelTensors, strict: bool) -> None:
        saved_ties: Mapping[str, str] = self._content["ties"] or {}
        if self._content["ties"] is None:
            raise ValueError(f"{self._folder} has no model: leave out model=.")
        known = self._content.get("quantized") or {}
        for name in sorted(known.keys() & tensors.quantized.keys()):
            if known[name] != tensors.quantized[name]:
                raise ValueError(
                    f"{name} is a quantized weight, which {self._folder} leaves out, and this model's has other "
                    f"values than the saved model's. Nothing was loaded: load the base that was saved, quantized alike."
                )
        replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
        missing = []
        for name, tensor in tensors.tensors.items():
            source = self._saved.get(f"model.{saved_ties.get(name, name)}")
            if source is None:
                missing.append(name)
                continue
            placement = placement_of(tensor)
            if overlaps_itself(local_rows(tensor)):
                raise ValueError(f"{name} is an expanded tensor, whose elements share memory: make it by .clone().")
            if tuple(source.size) != placement.shape or source.properties.dtype != tensor.dtype:
                hint = " A training with master copies and one with float32 parameters do not load each other's state."
                raise ValueError(
                    f"{name} is of shape {list(source.size)} and {source.properties.dtype} in {self._folder}, and of "
                    f"{list(placement.shape)} and {tensor.dtype} in the model: build the model that was saved."
                    f"{hint if tuple(source.size) == placement.shape else ''}"
                )
            real = tensor
            if tensor.is_meta:
                if not is_pipelined(model):
                    raise ValueError(f"{name} is on the meta device: wrap the model, or give it memory by to_empty().")
                real = with_type_of(torch.zeros_like(tensor, device="cpu", requires_grad=False), tensor)
                replaced.append((tensor, real))
            key = f"model.{saved_ties.get(name, name)}"
            if not is_sharded(tensor) and not is_of_experts(tensor):
                self.of_replicas.add(key)
            memory = local_rows(real)
            values = self._writable(memory)
            self._add(key, blocks_of(values, placement), is_new=real is not tensor or values is not memory)
        if missing and strict:
            raise ValueError(
                f"{self._folder} lacks {listed(missing)} of the model. Nothing was loaded: build the model that was "
                f"saved, or give strict=False."
            )
        if is_pipelined(model):
            pipelined = cast(WrappedModel, model)
            loaded = {id(old) for old, _ in replaced}
            named = {name: each for name, each in tensors.tensors.items() if id(each) in loaded}
            parameters = {name: each for name, each in named.items() if isinstance(each, nn.Parameter)}
            check_no_optimizer_holds(parameters, "Make the optimizer after load_checkpoint.")
            # Tensors that a checkpoint does not have get initial weights, such as buffers that are not persistent.
            local = pipelined.local_module
            rest = [tensor for tensor in (*local.parameters(), *local.buffers()) if tensor.is_meta]
            rest = [tensor for tensor in rest if id(tensor) not in loaded]
            replaced += zip(rest, pipelined.initial_weights_of(rest), strict=True)
            self._after.append(lambda: pipelined.replace_local_tensors(replaced))

    def _add_optimizer(
        self, optimizer: Optimizer, saved: SavedOptimizer, names: Mapping[int, str], strict: bool
    ) -> list[list[int]]:
        """Add the state of ``optimizer``; return the places of its groups among those that were ``saved``."""
        places = places_of(optimizer, names, saved.groups)
        if not saved.kind:
            check_options(
                optimizer, [saved.groups[number] for number in sorted({each for of in places for each in of})]
            )
        options = new_options(optimizer, places, saved.groups)
        states = self._content["optimizer"]["states"]
        own = {id(each): number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
        for held in list(held_state(optimizer, names)):
            described = states.get(held.name, {})
            state = held.new_state(described, options[own[id(held.parameter)]])
            in_use = {id(held.values), *map(id, held.states.get(held.values, {}).values())}
            for key, value in state.items():
                if "tensor" in described[key]:
                    name = f"optimizer.{held.name}.{key}"
                    memory = local_rows(value)
                    values = self._writable(memory)
                    is_new = id(value) not in in_use or values is not memory
                    self._add(name, held.blocks(value, values), is_new)
                    if not held.is_shard and not is_of_experts(held.parameter):
                        self.of_replicas.add(name)
            self._after.append(partial(held.give, state, described))
        frozen = [name for name in not_sharded(optimizer, names) if is_stepped(states.get(name, {}))]
        if frozen and strict:
            raise ValueError(
                f"{self._folder} has the optimizer's state of {listed(frozen)}, which do not require a gradient: call "
                f"requires_grad_(True) before the load. Nothing was loaded; strict=False leaves their state out."
            )
        self._after.append(partial(_give_options, optimizer, options))
        self._after.append(partial(mark_loaded, optimizer))
        return places

    def _add_random(self, model: nn.Module | None) -> None:
        saved = self._content["random"]
        if self._content["layout"] != layout():
            # Other ranks draw for other layers: their states have no meaning here.
            return
        rank = Exchange().rank
        self._add_made(f"random.{rank}")
        self._after.append(lambda: set_random_state(saved[rank], self._made, model))

    def _add_made(self, part: str) -> None:
        """Read whole the tensors of a ``part`` into new memory."""
        for name, saved in self._saved.items():
            if part_of(name) == part:
                self._made[name] = torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
                self._add(name, whole(self._made[name]), is_new=True)

    def _add(self, name: str, blocks: TensorBlocks, is_new: bool) -> None:
        first = self.tensors.setdefault(name, blocks)
        if first is not blocks:
            # Two tensors of this model were one: the second gets the values of the first.
            self._copies.append((first, blocks))
        elif is_new:
            self.in_new_memory.add(name)

    def _writable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, or host memory from which it gets its values when all ranks have read."""
        values = readable(tensor)
        if values is not tensor:
            self._host_copies.append((tensor, values))
        return values


def _give_options(optimizer: Optimizer, options: Sequence[dict[str, Any]]) -> None:
    for group, own in zip(optimizer.param_groups, options, strict=True):
        for key, value in own.items():
            old = group.get(key)
            # A rate in a tensor is where the optimizer reads it.
            if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor):
                value = value.to(old.device)
            group[key] = value
