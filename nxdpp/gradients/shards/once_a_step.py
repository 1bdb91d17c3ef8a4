"""Parameters that are gathered and gradients that are reduced once a step.

::

    begin                     gathers of two units start, in the order of the schedule
    first forward of a stage  waits for the unit of each layer as it gets there, and starts the next gather
    last backward             a unit is reduced and freed once its gradients are final

In between the parameters are whole, and their gradients add up as in one process. A gather has a message as large as
its unit, in memory that a CUDA stream keeps: so few are on their way at once.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from nxdpp.agreement.exchange import ReplicaExchanges
from nxdpp.gradients.shards.rank_shards import Changes, RankShards, StageShards
from nxdpp.gradients.shards.unit import ShardedUnit
from nxdpp.ground.torch_names import COMPILED_CALL
from nxdpp.schedules.actions import ActionKind

# Units whose gathers are on their way.
_AHEAD = 2


class OnceAStep(RankShards):
    """Units that are whole from the first forward of a stage to its last action."""

    def __init__(
        self, stages: Mapping[int, StageShards], exchanges: ReplicaExchanges, changes: Changes, module: nn.Module
    ) -> None:
        super().__init__(stages, exchanges, changes, module)
        # Of the present step: the stages of each unit that have not ended.
        self._remaining_stages: dict[ShardedUnit, int] = {}
        # Of the present step: the units whose gathers have not started.
        self._later: Iterator[ShardedUnit] = iter(())
        # Of the present last backward, in the order in which all replicas reduce.
        self._queue: deque[ShardedUnit] = deque()
        self._missing: dict[ShardedUnit, set[int]] = {}
        self._reduced: ShardedUnit | None = None

    def begin(self, train: bool, reduces: bool, lines: Sequence[str], rounds: int = 0) -> None:
        """Begin a step, as ``RankShards.begin`` does, and start to gather units."""
        super().begin(train, reduces, lines, rounds)
        self._remaining_stages = dict.fromkeys(self.units, 0)
        for stage in self._stages.values():
            for unit in stage.units:
                self._remaining_stages[unit] += 1
        self._later = iter(self.units)
        self._start(_AHEAD)

    def _start(self, count: int) -> None:
        for unit in islice(self._later, count):
            unit.start_gather()

    def _make_whole(self, units: Iterable[ShardedUnit]) -> None:
        for unit in units:
            unit.make_whole()
            self._start(1)

    def run(self, stage: int, kind: ActionKind, is_first: bool, is_last: bool, compute: Callable[[], None]) -> None:
        """Make the call ``compute``, as ``RankShards.run`` does."""
        own = self._stages[stage]
        hooks = self._enter(own) if is_first else []
        if is_last and self._step.reduces:
            hooks += self._follow_last(own)
        elif kind is not ActionKind.FORWARD:
            hooks += [hook for unit in own.units for hook in unit.convert_each()]
        try:
            compute()
        finally:
            for hook in hooks:
                hook.remove()
        if is_first:
            # A layer that its first forward has left out.
            self._make_whole(own.units)
        if is_last:
            self._leave(own)
        elif kind is not ActionKind.FORWARD:
            for unit in own.units:
                unit.convert()

    def _enter(self, stage: StageShards) -> list[RemovableHandle]:
        """Wait for the units of ``stage``; a layer waits for its own in its first forward."""
        self._make_whole(stage.rest)
        hooks = []
        for layer in stage.layers:
            if COMPILED_CALL.of(layer.module) is not None:
                # A hook would break its graph.
                self._make_whole(layer.units)
            else:
                wait = partial(self._before_forward, layer.units)
                hooks.append(layer.module.register_forward_pre_hook(wait, prepend=True))
        return hooks

    def _before_forward(self, units: Iterable[ShardedUnit], module: nn.Module, arguments: Any) -> None:
        self._make_whole(units)

    def _follow_last(self, stage: StageShards) -> list[RemovableHandle]:
        """Reduce the units of ``stage`` in its last backward, each once its gradients are final."""
        self._queue = deque(unit for unit in stage.backwards if unit.is_trained and self._remaining_stages[unit] == 1)
        self._missing = {unit: set(map(id, unit.whole_trained())) for unit in self._queue}
        return [
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, unit))
            for unit in self._queue
            for parameter in unit.whole_trained()
        ]

    def _accumulated(self, unit: ShardedUnit, parameter: torch.Tensor) -> None:
        """Hook of autograd: the gradient of ``parameter`` is final. All replicas reduce in one order."""
        self._missing[unit].discard(id(parameter))
        while self._queue and not self._missing[self._queue[0]]:
            first = self._queue.popleft()
            self._reduce(first)
            # Its own backward may still read it, which is over once the unit before it is at its end.
            if self._reduced is not None:
                self._reduced.free()
            # Frozen parameters may be needed later.
            self._reduced = first if first.trains_all else None

    def _leave(self, stage: StageShards) -> None:
        """End ``stage``: reduce what is not reduced, and free all of it that no later action needs."""
        while self._queue:
            self._reduce(self._queue.popleft())
        self._missing, self._reduced = {}, None
        for unit in stage.units:
            self._remaining_stages[unit] -= 1
            if self._step.train and (self._remaining_stages[unit] or not self._step.reduces):
                unit.convert()
            if not self._remaining_stages[unit]:
                if self._step.reduces and unit.is_trained:
                    unit.check_reduced(
                        "a reentrant checkpoint runs its module twice. Give torch.utils.checkpoint use_reentrant=False."
                    )
                unit.free()

    def abandon(self) -> None:
        """Forget the present step, as ``RankShards.abandon`` does."""
        self._queue.clear()
        self._missing, self._reduced, self._later = {}, None, iter(())
        super().abandon()
