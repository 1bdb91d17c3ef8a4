"""Every schedule next to one process on the same device: equal numbers, and times."""

import time
from collections.abc import Callable, Iterator
from typing import cast

import torch

from benchmarks.first_hour.place import Found, Rank, apart
from nxdpp import NxDPPModel, parallel_state
from nxdpp.devices.kinds import device_of
from nxdpp.schedules.families.registry import FAMILIES

ROWS_OF_A_MICROBATCH = 2
EVALUATION, REPLICAS = ", run_eval", ", 2 replicas"
# Sums over replicas have a different order than in one process; see the promises in docs/design.md.
_ROUNDED = 1e-4


def cases(ranks: int) -> list[str]:
    """Return all families, an evaluation, and two replicas where the ranks are enough."""
    replicated = [f"1f1b{REPLICAS}"] if ranks >= 4 and ranks % 2 == 0 else []
    return [*FAMILIES, f"1f1b{EVALUATION}", *replicated]


def run(rank: Rank, case: str) -> Found:
    """Train one step of the schedule and of one process, compare, and time further steps."""
    replicas = 2 if case.endswith(REPLICAS) else 1
    device = rank.begin(rank.count // replicas)
    try:
        return _Run(rank, case, device, replicas).found()
    finally:
        parallel_state.destroy_model_parallel()


class _Run:
    """One case on this rank, which also trains the whole model by itself."""

    def __init__(self, rank: Rank, case: str, device: torch.device, replicas: int) -> None:
        self._trains = not case.endswith(EVALUATION)
        self._steps = 1 if rank.place.dry else 10
        self._microbatches = 2 * rank.count
        self._allowed = 0.0 if replicas == 1 else _ROUNDED
        rows = self._microbatches * ROWS_OF_A_MICROBATCH
        self._batches = [rank.place.ids(rows, seed=replica) for replica in range(replicas)]
        self._device = device_of(device)
        # A layer for each stage of two chunks on each rank.
        whole = rank.place.llama(2 * rank.count)
        self._wrapped = NxDPPModel(
            whole, num_microbatches=self._microbatches, schedule=case.partition(",")[0], return_mb_loss=True
        )
        self._wrapped.move_model_to_device(device)
        self._alone = rank.place.llama(2 * rank.count).to(device)

    def found(self) -> Found:
        replica = parallel_state.get_data_parallel_rank()
        own = self._batches[replica]
        listed = self._step(own)
        losses = [self._step_alone(batch, len(self._batches)) for batch in self._batches][replica]
        pairs = zip(listed or [], losses if listed else [], strict=True)
        loss = max((apart(ours, theirs) for ours, theirs in pairs), default=None)
        gradients = max(self._gradient_differences(), default=0.0)
        figures = {
            "loss": loss,
            "gradients": gradients,
            "seconds": self._seconds(lambda: self._step(own)),
            "seconds_of_one_process": self._seconds(lambda: self._step_alone(own, 1)),
            "busy": self._wrapped.last_busy_share,
        }
        if max(loss or 0.0, gradients) <= self._allowed:
            return Found(figures)
        return Found(figures, f"apart from one process: the loss {loss}, a gradient {gradients}")

    def _step(self, ids: torch.Tensor) -> list[torch.Tensor] | None:
        run = self._wrapped.run_train if self._trains else self._wrapped.run_eval
        return cast("list[torch.Tensor] | None", run(input_ids=ids, labels=ids))

    def _step_alone(self, ids: torch.Tensor, replicas: int) -> list[torch.Tensor]:
        losses = []
        for part in ids.to(self._device.device).chunk(self._microbatches):
            with torch.set_grad_enabled(self._trains):
                loss = self._alone(input_ids=part, labels=part).loss
            if self._trains:
                (loss / self._microbatches / replicas).backward()
            losses.append(loss.detach())
        return losses

    def _gradient_differences(self) -> Iterator[float]:
        theirs = dict(self._alone.named_parameters())
        for name, parameter in self._wrapped.local_named_parameters() if self._trains else ():
            gradient, expected = parameter.grad, theirs[name].grad
            yield float("inf") if gradient is None or expected is None else apart(gradient, expected)

    def _seconds(self, step: Callable[[], object]) -> float:
        """Return the median time of a step."""
        times = []
        for _ in range(self._steps):
            self._device.synchronize()
            started = time.perf_counter()
            step()
            self._device.synchronize()
            times.append(time.perf_counter() - started)
        return sorted(times)[len(times) // 2]
