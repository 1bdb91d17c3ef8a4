"""Moving a model and keeping what was noted on its parameters."""

import torch
from torch import nn


def move_model_to_device(model: nn.Module, device: torch.device | str | int) -> None:
    """Moves all parameters and buffers of ``model`` to ``device`` in place; not collective.

    Where torch has to make a new ``Parameter`` (between device types that cannot share one), it gets the
    old one's own attributes, such as ``parameter.tensor_model_parallel``, and its place wherever the old
    one was shared. Raises ``ValueError`` for parameters or buffers without values, on the meta device.
    """
    target = torch.device(device)
    _check_have_values(model, target)
    before = dict(model.named_parameters(remove_duplicate=False))
    model.to(target)
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        old = before[name]
        if parameter is old:
            continue
        if old in moved:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, moved[old])
            continue
        vars(parameter).update(vars(old))
        moved[old] = parameter


def _check_have_values(model: nn.Module, target: torch.device) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    without = [name for name, tensor in tensors if tensor.is_meta]
    if without and target.type != "meta":
        raise ValueError(
            f"{len(without)} of the model's {len(tensors)} parameters and buffers are on the meta device and "
            f"have no values to move to {target}, the first of them {without[0]}: give them values first, "
            f"with model.to_empty(device={str(target)!r}) and an initialization or a checkpoint"
        )
