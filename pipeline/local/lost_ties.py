"""Ties of transformers models that a move to a device has undone."""

from torch import nn
from transformers import PreTrainedModel

from nxdpp.agreement.same_values import sample
from nxdpp.devices.kinds import device_of
from nxdpp.tracing.modules import listings


def refuse_lost_ties(root: nn.Module) -> None:
    """Raise ``ValueError`` for a tied weight of ``root`` that is two equal parameters on a lazy device.

    There ``Module.to`` makes a new parameter for each name. The two would be trained apart.
    """
    parameters = dict(listings.named_parameters(root, remove_duplicate=False))
    for prefix, module in listings.named_modules(root):
        if not isinstance(module, PreTrainedModel):
            continue
        for key, source in module.all_tied_weights_keys.items():
            name, first = (f"{prefix}.{each}" if prefix else each for each in (key, source))
            one, other = parameters.get(name), parameters.get(first)
            if one is None or other is None or one is other or not _are_equal_on_lazy_device(one, other):
                continue
            raise ValueError(
                f"{first} and {name} are one weight by the configuration of {type(module).__name__}, and two "
                f"parameters on {one.device}: Module.to() unties weights there. Call tie_weights() of the model after "
                f"it; or wrap the model on the CPU, and call move_model_to_device()."
            )


def _are_equal_on_lazy_device(one: nn.Parameter, other: nn.Parameter) -> bool:
    if one.device != other.device or not device_of(one.device).is_lazy:
        return False
    return (one.shape, one.dtype) == (other.shape, other.dtype) and sample(one) == sample(other)
