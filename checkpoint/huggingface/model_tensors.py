"""The names by which tensors go in files and in state dicts."""

import torch
from torch import nn

from nxdpp.pipeline.model import NxDPPModel


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of ``module`` themselves, by name, tied ones under each of their names.

    Raises ``ValueError`` where modules keep something else in a state dict.
    """
    state = module.state_dict(keep_vars=True)
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor) or _is_extra(name)]
    if others:
        raise ValueError(
            f"{others[0]} is extra state of a module, no parameter or buffer, and has no place in a Hugging Face "
            f"directory. Use local_state_dict() and torch.save for this model."
        )
    return state


def check_wrapped(model: NxDPPModel, function: str) -> None:
    """Raise ``TypeError`` where ``model`` is not wrapped."""
    if not isinstance(model, NxDPPModel):
        raise TypeError(
            f"{function} is for an NxDPPModel, not for a {type(model).__name__}: wrap the model first, or use its own "
            f"methods."
        )


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"
