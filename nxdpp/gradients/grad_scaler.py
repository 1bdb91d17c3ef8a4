"""Scaling of the loss for float16, with one scale and one decision about a step on all ranks.

::

    scaler = nxdpp.GradScaler()
    model = NxDPPModel(module, ..., grad_scaler=scaler)
    with torch.autocast(device_type, torch.float16):
        loss = model.run_train(**batch)          the backward begins at the scaled loss
    scaler.step(optimizer)                       an overflow on any rank skips the step on all ranks
    scaler.update()
"""

import zlib
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from nxdpp.devices.kinds import device_of
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from nxdpp.gradients.replaced_parameters import parameters_of
from nxdpp.gradients.shards.local_tensors import is_sharded, local_rows
from nxdpp.ground.torch_names import UNSCALE
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.host_wire import on_wire


class GradScaler(torch.amp.GradScaler):
    """torch's ``GradScaler`` over all ranks.

    ``run_train`` scales the loss before its backward, and returns it unscaled. ``unscale_`` and ``step`` are
    collective over all ranks: each rank calls them for its optimizer. Everything else is torch's.

    Args:
        device: type of the ranks' devices, by default this rank's.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as torch's, equal on all ranks.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        device = parallel_state.local_device().type if device is None else device
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._kind = device
        self._begun_on: torch.device | None = None
        self._unscaled: set[int] = set()

    def __setstate__(self, state: Any) -> None:
        # A copy has no scale on a device yet.
        super().__setstate__(state)
        self._begun_on, self._unscaled = None, set()

    def settings(self) -> Any:
        """Return the settings that must be equal on all ranks."""
        return self.state_dict() or None

    def begin_step(self, device: torch.device) -> None:
        """Make the scale a tensor on ``device``, the device of a rank's stages.

        Raises ``ValueError`` for a scaler of another type of device.
        """
        if self.is_enabled() and self._kind != device.type:
            raise ValueError(
                f"grad_scaler is for {self._kind!r}, and the stages of this rank are on {str(device)!r}: make it "
                f"with GradScaler({device.type!r})."
            )
        if self.is_enabled() and self._begun_on is None:
            self._begun_on = device
            super().scale(torch.ones((), device=device))

    def loss_gradient(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the gradient with which the backward of ``loss`` begins: the scale, in its shape and dtype."""
        scaled: torch.Tensor = super().scale(torch.ones_like(loss))
        return scaled.to(loss.dtype)

    def check_unscaled(self) -> None:
        """Raise ``RuntimeError`` unless ``unscale_`` was called since the last ``update``."""
        if self.is_enabled() and not self._unscaled:
            raise RuntimeError(
                "the gradients are scaled, and so would be their norm: call scaler.unscale_(optimizer) before "
                "clip_grad_norm_. scaler.step(optimizer) then leaves the scale out."
            )

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs`` times the scale: other losses of this rank, with a backward of their own.

        Raises ``RuntimeError`` for the loss of ``run_train``, whose backward has run.
        """
        if outputs is None or (isinstance(outputs, torch.Tensor) and not outputs.requires_grad):
            raise RuntimeError(
                "run_train has scaled its loss and run the backward: leave scaler.scale(loss).backward() out. "
                "NxDPPModel(..., grad_scaler=scaler) takes the scaler."
            )
        if self.is_enabled():
            self.begin_step(torch.empty(0, device=self._kind).device)
        return super().scale(outputs)

    def _check_begun(self, function: str) -> None:
        if self.is_enabled() and self._begun_on is None:
            raise RuntimeError(
                f"{function} comes before a run_train with this scaler: give it to the model, "
                f"NxDPPModel(..., grad_scaler=scaler)."
            )

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of ``optimizer``, and find overflows on all ranks; collective over all ranks."""
        self._check_begun("unscale_")
        super().unscale_(optimizer)
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale, and step ``optimizer`` unless a rank has an overflow; collective over all ranks."""
        self._check_begun("step")
        result = super().step(optimizer, *args, **kwargs)
        self._unscaled.discard(id(optimizer))
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale as torch's scaler does; not collective. A device that records operations starts them."""
        self._check_begun("update")
        super().update(new_scale)
        self._unscaled.clear()
        if self._begun_on is not None:
            device_of(self._begun_on).submit()

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        parallel_state.refuse_in_debug("a step of GradScaler")
        with board.call("GradScaler.unscale_"), failure_watch.reported():
            if not allow_fp16:
                _refuse_float16(optimizer)
            holder: Any = optimizer.holding_gradients() if isinstance(optimizer, Zero1Optimizer) else optimizer
            if any(is_sharded(parameter) for parameter in parameters_of(optimizer)):
                # Torch would unscale copies of the rows.
                holder = SimpleNamespace(param_groups=[{"params": [*map(_rows, parameters_of(optimizer))]}])
            found = UNSCALE.of(super())(holder, inv_scale, found_inf, allow_fp16)
            return {found_inf.device: self._anywhere(optimizer, found.values(), found_inf.device)}

    def _anywhere(
        self, optimizer: torch.optim.Optimizer, found: Iterable[torch.Tensor], device: torch.device
    ) -> torch.Tensor:
        """Return 1.0 if any rank has found an overflow, else 0.0.

        Raises ``RuntimeError`` for different scales, and for optimizers in another order on some ranks.
        """
        scale = super().scale(torch.ones((), device=device))
        total = sum((each.to(device) for each in found), torch.zeros((), device=device))
        kind, shapes = _identity(optimizer)
        numbers = device_of(device).from_host(torch.tensor([kind, -kind, 0, 0], dtype=scale.dtype, device="cpu"))
        own = torch.cat([torch.stack([total, scale, -scale]), numbers])
        wait = Wait("overflows of the scaled gradients")
        for group in (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_replica_group(),
        ):
            if group is parallel_state.get_replica_group():
                # Stages have other parameters; replicas have the same.
                own[5], own[6] = shapes, -shapes
            if dist.get_world_size(group) > 1:
                own, wait = on_wire(own, group), Wait("overflows of the scaled gradients", group)
                with wait:
                    dist.all_reduce(own, dist.ReduceOp.MAX, group)
        device_of(device).submit()
        with wait:
            # Where messages stop a stream, the host waits for the other ranks here.
            overflows, largest, negative_smallest, *identities = device_of(own.device).to_host(own)().tolist()
        if identities[0] != -identities[1] or identities[2] != -identities[3]:
            raise RuntimeError(
                f"the ranks step their optimizers in different orders: another rank has another one at the place of "
                f"this rank's {type(optimizer).__name__}, and would skip it for the overflow of this one. Call "
                f"scaler.unscale_ and scaler.step for the optimizers in the same order on every rank."
            )
        if largest != -negative_smallest:
            raise RuntimeError(
                f"the ranks scale the loss by different numbers, {-negative_smallest} to {largest}. Give update() and "
                f"load_state_dict() the same values on every rank."
            )
        anywhere = torch.zeros((), device=device)
        device_of(device).fill(anywhere, torch.tensor(float(overflows > 0), device="cpu"))
        return anywhere


def check_grad_scaler(value: Any) -> None:
    """Raise ``TypeError`` unless ``value`` is a ``GradScaler`` over all ranks, or ``None``."""
    if value is not None and not isinstance(value, GradScaler):
        raise TypeError(
            f"grad_scaler must be an nxdpp.GradScaler, not {value!r:.80}: torch's decides about a step on each rank "
            f"alone. nxdpp.GradScaler takes the same arguments."
        )


def _identity(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return a hash of the kind of an optimizer, and one of its parameters: 24 bits each, exact in float32.

    Groups are left out of the kind: a stage may have no parameters of one of them.
    """
    defaults = sorted(
        (key, value) for key, value in optimizer.defaults.items() if isinstance(value, bool | int | float | str | tuple)
    )
    shapes = [[tuple(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]
    texts = repr((type(optimizer).__name__, defaults)), repr(shapes)
    kind, own = (zlib.crc32(text.encode()) & 0xFFFFFF for text in texts)
    return kind, own


def _rows(parameter: torch.Tensor) -> torch.Tensor:
    """The rows of ``parameter`` on this rank, with the rows of its gradient."""
    rows = local_rows(parameter.detach()).detach()
    rows.grad = None if parameter.grad is None else local_rows(parameter.grad)
    return rows


def _refuse_float16(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.dtype == torch.float16:
                raise ValueError(
                    f"a parameter of shape {list(parameter.shape)} has a gradient in float16, which cannot be unscaled "
                    f"without a loss of small values. Keep the parameters in float32 (module.float()), and run the "
                    f"step under torch.autocast({parameter.device.type!r}, torch.float16)."
                )
