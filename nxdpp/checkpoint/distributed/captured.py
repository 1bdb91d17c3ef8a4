"""State of a training as a checkpoint stores it: tensors in rectangles, and everything else as JSON.

A rank's random generators are Python's, NumPy's, torch's on the CPU and the device, and the tracker's.
"""

import random
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from nxdpp.agreement.same_values import sample
from nxdpp.checkpoint.distributed.model_state import ModelTensors, local_module_of, model_tensors, names_of
from nxdpp.checkpoint.distributed.optimizer_state import Description, held_state, optimizer_class
from nxdpp.checkpoint.distributed.optimizers import Optimizers, SavedOptimizer
from nxdpp.checkpoint.distributed.parameter_groups import groups_of
from nxdpp.checkpoint.distributed.rectangles import PlaceInWhole, TensorBlocks, blocks_of, placement_of, whole
from nxdpp.checkpoint.distributed.schedulers import rest_of, scheduled_values
from nxdpp.checkpoint.distributed.shared_reads import owners, replica
from nxdpp.checkpoint.distributed.structured import decoded, encoded
from nxdpp.checkpoint.huggingface.read_directory import texts_in
from nxdpp.devices.kinds import device_of, readable
from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.shards.local_tensors import is_sharded, local_rows
from nxdpp.pipeline.local.half_loaded import check_whole
from nxdpp.ranks import parallel_state
from nxdpp.ranks.exchange import Exchange, is_several
from nxdpp.ranks.random_stream import stream_state_of
from nxdpp.tensor.random import get_xla_rng_tracker
from nxdpp.tensor.tensor_attributes import param_is_not_tensor_parallel_duplicate

Part = tuple[str, PlaceInWhole]
"""Name of a parameter, and the place in it of what a rank has."""


@dataclass
class Described:
    """All of a rank's state except its tensors; ``None`` for what the training does not have.

    ``names`` are the model's, and ``configuration`` has files of a transformers model by name, both of rank 0.
    ``ties`` and ``quantized`` are as in ``ModelTensors``. ``optimizers`` have the parameter groups of each by name,
    with this rank's names of parameters; they ``have_names`` if the program has given them some. ``states`` describes
    the state of each parameter that this rank keeps; a frozen one has none. ``scheduler`` is all of its state but
    values of groups, to be compared.
    ``samples`` has hashes of a sample of each parameter, by name and the part that this rank has; it is empty in one
    process. ``random`` has the states of this rank's generators, and ``others`` scheduler, scaler and user content as
    JSON.
    """

    layout: dict[str, int]
    names: list[str] = field(default_factory=list)
    ties: dict[str, str] | None = None
    configuration: dict[str, str] | None = None
    optimizers: dict[str, SavedOptimizer] = field(default_factory=dict)
    have_names: bool = False
    states: dict[str, Description] = field(default_factory=dict)
    samples: dict[Part, bytes] = field(default_factory=dict)
    quantized: dict[str, str] = field(default_factory=dict)
    random: Any = None
    scheduler: str = ""
    others: dict[str, Any] = field(default_factory=dict)


class Captured(NamedTuple):
    """State of a rank: tensors that it writes, by name, and the rest."""

    tensors: dict[str, TensorBlocks]
    described: Described


def captured(
    model: nn.Module | None,
    optimizers: Optimizers,
    scheduler: Stateful | None,
    grad_scaler: Stateful | None,
    user_content: Any,
) -> Captured:
    """Return what this rank saves; not collective. Raises ``ValueError`` for what a checkpoint cannot hold."""
    result = Described(layout())
    own: dict[str, TensorBlocks] = {}
    replicated: dict[str, TensorBlocks] = {}
    of_first: dict[str, TensorBlocks] = {}
    tensors = None if model is None else model_tensors(model)
    if model is not None:
        check_whole(local_module_of(model))
    for optimizer in optimizers.values():
        check_whole(optimizer)
    if tensors is not None:
        result.ties, result.quantized = tensors.ties, tensors.quantized
        if any(tensor.is_meta for tensor in tensors.tensors.values()):
            raise ValueError("the model has tensors on the meta device, without values: call move_model_to_device().")
        values = {name: readable(local_rows(tensor)) for name, tensor in tensors.tensors.items()}
        result.samples = _samples(tensors, values)
        for name, tensor in tensors.tensors.items():
            if not _writes(tensor):
                continue
            # Statistics of batch norms depend on a replica's own batches: save all of them from one replica.
            divided = is_sharded(tensor) or is_of_experts(tensor)
            into = own if divided else replicated if isinstance(tensor, nn.Parameter) else of_first
            into[f"model.{name}"] = blocks_of(values[name], placement_of(tensor))
    if optimizers and tensors is None:
        raise ValueError("an optimizer is saved with the model whose parameters it has: give model= too.")
    names = {} if tensors is None else tensors.names()
    for key, optimizer in optimizers.items():
        groups = groups_of(optimizer, names)
        of_groups = scheduled_values(scheduler, optimizer)
        groups = [group._replace(scheduled=each) for group, each in zip(groups, of_groups, strict=True)]
        result.optimizers[key] = SavedOptimizer(optimizer_class(optimizer), groups)
        result.have_names |= any("param_names" in group for group in optimizer.param_groups)
    for held in (held for optimizer in optimizers.values() for held in held_state(optimizer, names)):
        if not _writes(held.parameter):
            continue
        description = held.description()
        if description:
            result.states[held.name] = description
        into = own if held.is_shard or is_of_experts(held.parameter) else replicated
        for key, value in held.tensors().items():
            into[f"optimizer.{held.name}.{key}"] = held.blocks(value, readable(local_rows(value)))
    if optimizers:
        result.scheduler = rest_of(scheduler)
    own.update(_own_share(replicated))
    if replica()[0] == 0:
        own.update(of_first)
    rank = Exchange().rank
    result.random, states = random_state(f"random.{rank}", model)
    own.update({name: whole(tensor) for name, tensor in states.items()})
    if rank == 0:
        result.configuration = None if model is None else configuration_of(model)
        result.names = [] if model is None else names_of(model)
        given = {"scheduler": scheduler, "grad_scaler": grad_scaler}
        states = {}
        result.others = {
            **{key: None if one is None else encoded(one.state_dict(), key, states) for key, one in given.items()},
            "user_content": encoded(user_content, "user_content", states),
        }
        own.update({name: whole(tensor) for name, tensor in states.items()})
    return Captured(own, result)


def configuration_of(model: nn.Module) -> dict[str, str] | None:
    """Return the text of each file of the configuration of a transformers model by name.

    ``None`` for any other module, and for a configuration that transformers refuses to write: a training continues
    without it, and a conversion asks for it.
    """
    if "transformers" not in sys.modules:
        return None
    from nxdpp.checkpoint.huggingface.write_directory import write_configuration

    with tempfile.TemporaryDirectory() as folder:
        try:
            write_configuration(getattr(model, "original_module", model), Path(folder))
        except ValueError:
            # Such as options of generation that contradict each other.
            return None
        return texts_in(Path(folder)) or None


def layout() -> dict[str, int]:
    """Sizes of the job."""
    if not is_several():
        return {"ranks": 1, "tensor": 1, "data": 1, "pipeline": 1}
    return {
        "ranks": Exchange().ranks,
        "tensor": parallel_state.get_tensor_model_parallel_size(),
        "data": parallel_state.get_replica_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_size(),
    }


def _writes(tensor: torch.Tensor) -> bool:
    """Return whether this rank writes ``tensor``, among the ranks of its replica that have the same elements."""
    if not is_several():
        return True
    return not getattr(tensor, "shared", False) and param_is_not_tensor_parallel_duplicate(tensor)


def _samples(tensors: ModelTensors, values: Mapping[str, torch.Tensor]) -> dict[Part, bytes]:
    """Hashes of a sample of each parameter: ranks with the same part of it must have the same ``values``."""
    if not is_several():
        return {}
    parameters = {name: each for name, each in tensors.tensors.items() if isinstance(each, nn.Parameter)}
    return {(name, placement_of(each)): sample(values[name]) for name, each in parameters.items()}


def _own_share(tensors: dict[str, TensorBlocks]) -> dict[str, TensorBlocks]:
    """The tensors that this replica writes, of all that every replica has: each writes about as much."""
    own, replicas = replica()
    chosen = owners({name: tensors[name].nbytes for name in sorted(tensors)}, replicas)
    return {name: blocks for name, blocks in tensors.items() if chosen[name] == own}


def random_state(prefix: str, model: nn.Module | None) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the states as JSON, those of the steps of ``model`` too, and its tensors under names with ``prefix``."""
    tensors: dict[str, torch.Tensor] = {}
    states = {
        "python": _python_state(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": _device_state(),
        "tracker": get_xla_rng_tracker().get_states(),
        "streams": None if model is None else vars(stream_state_of(local_module_of(model))),
    }
    return encoded(states, prefix, tensors), tensors


def set_random_state(saved: Any, tensors: Mapping[str, torch.Tensor], model: nn.Module | None) -> None:
    """Continue with the states of ``random_state``."""
    states = decoded(saved, tensors)
    version, numbers, following = states["python"]
    random.setstate((version, tuple(numbers.tolist()), following))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    get_xla_rng_tracker().set_states(states["tracker"])
    # Older checkpoints have none.
    if model is not None and states.get("streams"):
        stream_state_of(local_module_of(model)).load(states["streams"])
    if parallel_state.model_parallel_is_initialized() and states["device"]:
        device_of(parallel_state.local_device()).set_random_state(states["device"])


def _python_state() -> tuple[int, torch.Tensor, float | None]:
    version, numbers, following = random.getstate()
    return version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), following


def _device_state() -> bytes:
    if not parallel_state.model_parallel_is_initialized():
        return b""
    device = device_of(parallel_state.local_device())
    # This training then continues as one that loads the state: XLA has a different state for operations of a graph.
    device.submit()
    return device.random_state()
