"""Times of a step: the share in which a rank computed, and the seconds of each compute action."""

from typing import Self

import torch

from nxdpp.devices.device import Stamp
from nxdpp.devices.kinds import device_of
from nxdpp.schedules.actions import Action


class StepTimer:
    """Time that a rank spends in blocks ``with timer``, as a share of the step; both are times of ``device``.

    On CUDA kernels, and the waits for NCCL's receives, run after the calls that start them. No block waits for them.
    On XLA it is the time in which the device ran the graphs of the step, wherever they were started.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._blocks: list[tuple[Stamp, Stamp]] = []
        self._actions: list[Action | None] = []
        self._action: Action | None = None
        self._since: Stamp = None
        self._step: tuple[Stamp, Stamp] | None = None
        self._started: Stamp = None

    def start(self) -> None:
        """Begin a step."""
        self._blocks.clear()
        self._actions.clear()
        self._step = None
        self._started = self._device.stamp()

    def stop(self) -> None:
        """End the step."""
        self._step = self._started, self._device.stamp()

    def of(self, action: Action) -> Self:
        """Return this timer, whose next block computes ``action``."""
        self._action = action
        return self

    def __enter__(self) -> None:
        self._since = self._device.stamp()

    def __exit__(self, *_: object) -> None:
        self._blocks.append((self._since, self._device.stamp()))
        self._actions.append(self._action)
        self._action = None

    @property
    def busy_share(self) -> float:
        """Share of the step, between 0 and 1, in which this rank computed; waits for its end on the device."""
        if self._step is None:
            return 0.0
        total = self._device.between(*self._step)
        return min(1.0, self._device.busy(self._step, self._blocks) / total) if total else 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the step on the device; waits for its end."""
        return 0.0 if self._step is None else 1e-9 * self._device.between(*self._step)

    @property
    def action_seconds(self) -> dict[str, float]:
        """Seconds of each compute action of the step by its text, ``2F0``; waits for their end.

        Empty on a device that only records operations in a block, and runs them later.
        """
        if self._step is None or self._device.is_lazy:
            return {}
        both = zip(self._actions, self._blocks, strict=True)
        return {str(action): 1e-9 * self._device.between(*block) for action, block in both if action is not None}
