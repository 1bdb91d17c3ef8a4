"""``generate`` of a tensor-parallel model: other prompts or random numbers on a rank would give a text of neither."""

import functools
from typing import Any

import torch
from transformers import PreTrainedModel

from nxdpp import parallel_state
from nxdpp.oslo.equal_inputs import verify_equal


def generation_of(own: type[PreTrainedModel]) -> dict[str, Any]:
    """Return the method ``generate`` of a parallel model whose class was ``own``, if that has one.

    It is collective over the tensor group, and compares its arguments there.
    """
    if not hasattr(own, "generate"):
        return {}

    @functools.wraps(own.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if parallel_state.get_tensor_model_parallel_size() > 1:
            settings = kwargs.get("generation_config") or self.generation_config
            samples = kwargs.get("do_sample", settings.do_sample)
            verify_equal(
                (args, kwargs, _next_number() if samples else None),
                "give all ranks of a tensor group the same arguments, and call torch.manual_seed with one number on "
                "them before sampling.",
            )
        return own.generate(self, *args, **kwargs)

    return {"generate": generate}


def _next_number() -> float:
    """The next random number of this rank's device, whose state stays."""
    device = parallel_state.local_device()
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        return float(torch.rand((), device=device))
