"""Experts of transformers whose products a device does not run."""

import torch
from torch import nn

from nxdpp.devices.kinds import device_of
from nxdpp.tracing.modules import listings

# transformers' name of the implementation that sorts tokens by expert and groups the products.
_GROUPED = "grouped_mm"


def refuse_grouped_experts(module: nn.Module, device: torch.device) -> None:
    """Raise ``ValueError`` for experts that use torch's grouped products, if ``device`` does not run them."""
    if device_of(device).runs_grouped_products:
        return
    for name, child in listings.named_modules(module):
        config = getattr(child, "config", None)
        # transformers writes this attribute into experts that it can compute in several ways.
        if hasattr(child, "_is_expert_parallel") and getattr(config, "_experts_implementation", None) == _GROUPED:
            raise ValueError(
                f"{name or 'the model'}, a {type(child).__name__}, computes its experts by {_GROUPED!r}, which torch "
                f"does not run on {device.type} devices. Call model.set_experts_implementation('batched_mm') "
                f"before the model is wrapped: its shapes do not depend on the data."
            )
