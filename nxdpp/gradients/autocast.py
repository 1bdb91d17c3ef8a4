"""Checks of the autocast around a step: it must be that of the device, and float16 needs a scaled loss.

torch only warns of ``torch.autocast("cuda")`` where CUDA is absent, and switches the block off.
"""

import functools
import weakref

import torch

from nxdpp.devices import CUDA, cuda
from nxdpp.devices.autocast import AUTOCAST_TYPES, autocast_types

_init = torch.autocast.__init__
_off: list["weakref.ref[torch.autocast]"] = []


def note_blocks_that_are_off() -> None:
    """Note each block of autocast that torch switches off, as long as the block lives."""
    torch.autocast.__init__ = _noted_init  # type: ignore[method-assign]  # nothing tells of the argument later


@functools.wraps(_init)
def _noted_init(
    self: torch.autocast,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    _init(self, device_type, dtype, enabled, cache_enabled)
    if enabled and device_type == CUDA and cuda.has_no_autocast():
        _off.append(weakref.ref(self, _off.remove))


def check_autocast(device: torch.device, is_scaled: bool) -> None:
    """Raise ``RuntimeError`` for an autocast that a step on ``device`` would not have, or needs a scaled loss for."""
    if _off or any(map(torch.is_autocast_enabled, AUTOCAST_TYPES)):
        _check_blocks(device, is_scaled)


def _check_blocks(device: torch.device, is_scaled: bool) -> None:
    kind = device.type
    if not torch.is_autocast_enabled(kind):
        block = _block_of_another_device()
        if block is not None:
            raise RuntimeError(
                f"the step is in torch.autocast({block[0]!r}, {block[1]}) and runs on {kind}: it would have no "
                f"autocast. Write torch.autocast(parallel_state.local_device().type, {block[1]})."
            )
    # Small gradients in float16 would become zero.
    elif torch.get_autocast_dtype(kind) == torch.float16 and not is_scaled:
        raise RuntimeError(
            f"autocast to float16 needs a scaled loss: small gradients would become zero. Give the model a scaler, "
            f"NxDPPModel(..., grad_scaler=nxdpp.GradScaler({kind!r})), with scaler.step(optimizer) and "
            f"scaler.update() after run_train. Or use torch.autocast({kind!r}, torch.bfloat16)."
        )


def _block_of_another_device() -> tuple[str, torch.dtype] | None:
    """The device and dtype of a block around this code that is on, or that torch has switched off."""
    if on := autocast_types():
        return on[0], torch.get_autocast_dtype(on[0])
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    blocks = (reference() for reference in _off if depth)
    # A block that was entered knows what was before it.
    return next(((b.device, b.fast_dtype) for b in blocks if b is not None and "prev" in vars(b)), None)
