"""Models of transformers that a device does not run as they are: ties that a move has undone, grouped experts."""

import torch
from torch import nn
from transformers import PreTrainedModel

from nxdpp.agreement.same_values import sample
from nxdpp.devices.kinds import device_of
from nxdpp.ground.transformers_names import EXPERTS
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


# transformers' name of the implementation that sorts tokens by expert and groups the products.
_GROUPED = "grouped_mm"


def refuse_grouped_experts(module: nn.Module, device: torch.device) -> None:
    """Raise ``ValueError`` for experts that use torch's grouped products, if ``device`` does not run them."""
    if device_of(device).runs_grouped_products:
        return
    for name, child in listings.named_modules(module):
        config = getattr(child, "config", None)
        # transformers writes this attribute into experts that it can compute in several ways.
        if hasattr(child, "is_transposed") and EXPERTS.held_by(config) and EXPERTS.of(config) == _GROUPED:
            raise ValueError(
                f"{name or 'the model'}, a {type(child).__name__}, computes its experts by {_GROUPED!r}, which torch "
                f"does not run on {device.type} devices. Call model.set_experts_implementation('batched_mm') "
                f"before the model is wrapped: its shapes do not depend on the data."
            )
