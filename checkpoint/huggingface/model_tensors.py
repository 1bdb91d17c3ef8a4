"""Tensors of a model under the names of its state dict."""

import torch
from torch import nn

from nxdpp.pipeline.model import NxDPPModel


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of ``module`` by name, a tied one under each of its names.

    Raises ``ValueError`` if a state dict has anything else.
    """
    state = module.state_dict(keep_vars=True)
    others = [
        name
        for name, value in state.items()
        if not isinstance(value, torch.Tensor) or name.rpartition(".")[2] == "_extra_state"
    ]
    if others:
        raise ValueError(
            f"{others[0]} is extra state of a module, which a Hugging Face directory cannot hold. Use "
            f"local_state_dict() and torch.save for this model."
        )
    return state


def check_wrapped(model: NxDPPModel, function: str) -> None:
    """Raise ``TypeError`` if ``model`` is not wrapped."""
    if not isinstance(model, NxDPPModel):
        raise TypeError(
            f"{function} is for an NxDPPModel, not for a {type(model).__name__}: wrap the model first, or use the "
            f"method of the model."
        )
