"""Parameters and persistent buffers of a model by original names and global shapes."""

from typing import NamedTuple, cast

import torch
from torch import nn

from nxdpp.checkpoint.distributed.rectangles import placement_of
from nxdpp.checkpoint.distributed.tensor_blocks import TensorBlocks, blocks_of
from nxdpp.checkpoint.huggingface.model_tensors import PipelinedModel, tensors_of, tied_names_of


class ModelTensors(NamedTuple):
    """The tensors of a model that this rank has.

    Attributes:
        tensors: by name; a tied one under its first name in the whole model alone.
        ties: the other names of tied tensors of the whole model, with their first name; equal on all ranks.
    """

    tensors: dict[str, torch.Tensor]
    ties: dict[str, str]

    def blocks(self) -> dict[str, TensorBlocks]:
        """The tensors as rectangles of the whole ones."""
        return {name: blocks_of(tensor, placement_of(tensor)) for name, tensor in self.tensors.items()}

    def names(self) -> dict[int, str]:
        """The name of each tensor by its ``id``."""
        return {id(tensor): name for name, tensor in self.tensors.items()}


def model_tensors(model: nn.Module) -> ModelTensors:
    """Return the tensors of ``model``: a pipelined one, of which a rank has a part, or a module of one process.

    Raises ``ValueError`` for extra state of modules, which only they can read.
    """
    local = getattr(model, "local_module", None)
    if isinstance(local, nn.Module) and hasattr(model, "tied_names"):
        state = tensors_of(local)
        groups = tied_names_of(cast(PipelinedModel, model))
    else:
        state = tensors_of(model)
        groups = _tied(state)
    ties = {name: names[0] for names in groups for name in names[1:]}
    return ModelTensors({ties.get(name, name): tensor for name, tensor in state.items()}, ties)


def _tied(state: dict[str, torch.Tensor]) -> list[list[str]]:
    """The names of each tensor that has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]
