"""Times of a step: the share in which a rank computed, and the times of each compute action."""

import torch

from nxdpp.devices.device import Stamp
from nxdpp.devices.kinds import device_of
from nxdpp.schedules.actions import Action, ActionKind


class StepTimer:
    """Time that a rank spends in compute actions, as a share of the step; both are times of ``device``.

    On CUDA kernels, and the waits for NCCL's receives, run after the calls that start them. No action waits for them.
    On XLA it is the time in which the device ran the graphs of the step, wherever they were started.

    Attributes:
        blocks: the stage, kind and microbatch of each action, with the stamps at its start and end. The stage runners
            append to it: a call for each action would take longer than the stamps.
        stamp: gives the present time of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self.blocks: list[tuple[int, ActionKind, int, Stamp, Stamp]] = []
        self.stamp = self._device.clock()
        self._step: tuple[Stamp, Stamp] | None = None
        self._started: Stamp = None

    def start(self) -> None:
        """Begin a step."""
        self.blocks.clear()
        self._step = None
        self._started = self.stamp()

    def stop(self) -> None:
        """End the step."""
        self._step = self._started, self.stamp()

    @property
    def busy_share(self) -> float:
        """Share of the step, between 0 and 1, in which this rank computed; waits for its end on the device."""
        if self._step is None:
            return 0.0
        total = self._device.between(*self._step)
        blocks = [block[3:] for block in self.blocks]
        return min(1.0, self._device.busy(self._step, blocks) / total) if total else 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the step on the device; waits for its end."""
        return 0.0 if self._step is None else 1e-9 * self._device.between(*self._step)

    @property
    def action_times(self) -> list[tuple[str, int, int]]:
        """Text, start and end of each compute action, in nanoseconds of ``time.perf_counter_ns``; waits for the device.

        Empty on a device that only records operations in an action, and runs them later.
        """
        if self._step is None or self._device.is_lazy:
            return []
        stamp, now = self._device.origin()
        placed = [
            (now - self._device.between(start, stamp), now - self._device.between(end, stamp))
            for *_, start, end in self.blocks
        ]
        return [(str(Action(*block[:3])), *times) for block, times in zip(self.blocks, placed, strict=True)]
