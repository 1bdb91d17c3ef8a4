"""Tensors of a model under the names of its state dict, and the parts of them that a tensor-parallel rank has."""

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from nxdpp.checkpoint.distributed.rectangles import Block, placement_of
from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.shards.local_tensors import local_rows
from nxdpp.ground.torch_names import EXTRA_STATE
from nxdpp.pipeline.local.own_save import state_of_all_names
from nxdpp.ranks import parallel_state
from nxdpp.tensor.collectives import all_gather
from nxdpp.tensor.embedding import ParallelEmbedding
from nxdpp.tensor.padding import whole_of
from nxdpp.tensor.shards import all_rows

_WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_orig_mod)\.")


class WrappedModel(Protocol):
    """The attributes of an ``NxDPPModel`` that loading and saving need."""

    original_module: nn.Module
    local_module: nn.Module
    tied_names: list[list[str]]

    def materialise(self) -> None:
        """Give initial weights to this rank's tensors on the meta device."""

    def initial_weights_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Initial weights for some of this rank's tensors on the meta device; the model is unchanged."""

    def replace_local_tensors(self, replaced: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Replace the first tensor of each pair by the second."""


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of ``module`` by name, a tied one under each of its names.

    The ones that other ranks hold are on the meta device.

    A module that ``torch.compile`` or ``checkpoint_wrapper`` wraps has the names of the module itself.

    Raises ``ValueError`` if a state dict has anything else.
    """
    state = state_of_all_names(module)
    others = [
        name
        for name, value in state.items()
        if not isinstance(value, torch.Tensor) or name.rpartition(".")[2] == EXTRA_STATE.name
    ]
    if others:
        raise ValueError(
            f"{others[0]} is extra state of a module, which a Hugging Face directory cannot hold. Use "
            f"local_state_dict() and torch.save for this model."
        )
    return {unwrapped_name(name): tensor for name, tensor in state.items()}


def tied_names_of(model: WrappedModel) -> list[list[str]]:
    """Return ``model.tied_names``, with the names of ``tensors_of``."""
    return [[unwrapped_name(name) for name in names] for names in model.tied_names]


def check_still_tied(state: Mapping[str, torch.Tensor], groups: Sequence[Sequence[str]]) -> None:
    """Raise ``ValueError`` where names of a tied parameter have different ones in ``state``: one would be lost."""
    for names in groups:
        if len({id(state[name]) for name in names if isinstance(state.get(name), nn.Parameter)}) > 1:
            raise ValueError(
                f"{' and '.join(names)} were one parameter when the model was wrapped, and are different ones now: "
                f"only one would be saved. Untie the model before it is wrapped."
            )


def unwrapped_name(name: str) -> str:
    """Return ``name`` without the attributes in which torch's wrappers hold a module."""
    return _WRAPPERS.sub("", name)


def check_wrapped(model: WrappedModel, function: str) -> None:
    """Raise ``TypeError`` if ``model`` is not wrapped."""
    if isinstance(model, type) or not hasattr(model, "replace_local_tensors"):
        raise TypeError(
            f"{function} is for an NxDPPModel, not for a {type(model).__name__}: wrap the model "
            f"first, or use the method of the model."
        )


def as_in_files(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself, or a meta tensor of the whole that it is a part of."""
    place = placement_of(tensor)
    return tensor if place.dim < 0 else torch.empty(place.shape, dtype=tensor.dtype, device="meta")


def joined(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of ``tensor``; collective over the ranks of a shard, and over the tensor or expert group for a part."""
    rows = all_rows(tensor)
    if is_of_experts(tensor):
        return all_gather(rows.detach(), 0, parallel_state.get_expert_model_parallel_group())
    return rows.detach() if placement_of(rows).dim < 0 else whole_of(rows)


def own_blocks(tensor: torch.Tensor) -> list[Block]:
    """Rectangles of the whole that are in ``tensor``; padding becomes zero."""
    place = placement_of(tensor)
    if place.dim >= 0 and sum(each.length for each in place.ranges) < place.local_shape[place.dim]:
        local_rows(tensor).detach().zero_()
    return place.blocks(tensor)


def check_no_padding(module: nn.Module) -> None:
    """Raise ``NotImplementedError`` for an embedding with rows behind its vocabulary."""
    for name, child in module.named_modules():
        if not isinstance(child, ParallelEmbedding):
            continue
        rows = child.num_embeddings_per_partition * child.tensor_parallel_size
        if rows != child.num_embeddings:
            raise NotImplementedError(
                f"{name} has {child.num_embeddings} tokens in {rows} rows, of which files would have the "
                f"{rows - child.num_embeddings} of padding too: use local_state_dict() on each rank."
            )
