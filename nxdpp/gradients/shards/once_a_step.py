"""Parameters that are gathered and gradients that are reduced once a step.

::

    begin               gathers of two units start, in the order of the schedule
    2GATHER0 2F0        the first forward of a stage waits for the unit of each layer as it gets there, and starts the
                        next gather
    2GATHERED0          layers that it has left out are whole, too
    2REDUCE7 2B7        in the last backward a unit is reduced and freed once its gradients are final
    2RESHARD7           the rest of the stage is reduced and freed

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
from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.lowering.additions import SHARDS_ONCE_A_STEP

# Units whose gathers are on their way.
_AHEAD = 2


class OnceAStep(RankShards):
    """Units that are whole from the first forward of a stage to its last action."""

    additions = SHARDS_ONCE_A_STEP

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
        # Of the present step, by stage: in its first forward, in its backwards but the last, and in the last.
        self._hooks: dict[int, list[RemovableHandle]] = {}

    @property
    def calls(self) -> Mapping[ActionKind, Callable[[Action], None]]:
        """The calls of ``additions``."""
        return {
            ActionKind.GATHER: self._gather,
            ActionKind.GATHERED: self._end_gather,
            ActionKind.REDUCE: self._follow_last,
            ActionKind.RESHARD: self._reshard,
        }

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

    def _gather(self, compute: Action) -> None:
        """Wait for the units of a stage before its first action; a layer waits for its own in its first forward."""
        stage, hooks = self._stages[compute.stage], []
        self._make_whole(stage.rest)
        for layer in stage.layers:
            if COMPILED_CALL.of(layer.module) is not None:
                # A hook would break its graph.
                self._make_whole(layer.units)
            else:
                wait = partial(self._before_forward, layer.units)
                hooks.append(layer.module.register_forward_pre_hook(wait, prepend=True))
        self._hooks[compute.stage] = hooks

    def _before_forward(self, units: Iterable[ShardedUnit], module: nn.Module, arguments: Any) -> None:
        self._make_whole(units)

    def _end_gather(self, compute: Action) -> None:
        """Make layers whole that the first forward of a stage has left out."""
        stage = self._stages[compute.stage]
        self._remove_hooks(compute.stage)
        self._make_whole(stage.units)
        if self._step.train:
            self._hooks[compute.stage] = [hook for unit in stage.units for hook in unit.convert_each()]

    def _follow_last(self, compute: Action) -> None:
        """Reduce the units of a stage in its last backward, each once its gradients are final."""
        if not self._step.reduces:
            return
        self._remove_hooks(compute.stage)
        stage = self._stages[compute.stage]
        self._queue = deque(unit for unit in stage.backwards if unit.is_trained and self._remaining_stages[unit] == 1)
        self._missing = {unit: set(map(id, unit.whole_trained())) for unit in self._queue}
        self._hooks[compute.stage] = [
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

    def _reshard(self, compute: Action) -> None:
        """Reduce what is left of a stage after its last action, and free all of it that no later action needs."""
        stage = self._stages[compute.stage]
        self._remove_hooks(compute.stage)
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

    def _remove_hooks(self, stage: int) -> None:
        for hook in self._hooks.pop(stage, ()):
            hook.remove()

    def abandon(self) -> None:
        """Forget the present step, as ``RankShards.abandon`` does."""
        for stage in list(self._hooks):
            self._remove_hooks(stage)
        self._queue.clear()
        self._missing, self._reduced, self._later = {}, None, iter(())
        super().abandon()
