"""The sharded units of one rank in a step: what is gathered, freed and reduced before and after which action.

::

    begin      the replicas verify that they begin the same step
    actions    of the schedule make whole what a compute action needs, and reduce and free what it leaves
    finish     gradients that no replica has are None
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.optim import Optimizer

from nxdpp.agreement.exchange import ReplicaExchanges
from nxdpp.gradients.average import largest_of
from nxdpp.gradients.optimizer_agreement import refuse_other_rounds
from nxdpp.gradients.replaced_parameters import parameters_of
from nxdpp.gradients.shards.unit import ShardedUnit
from nxdpp.gradients.step_hooks import run_before_steps_of
from nxdpp.ground.torch_names import STORAGE_ADDRESS, pytree
from nxdpp.ranks import parallel_state
from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.lowering.additions import Addition


@dataclass(frozen=True)
class ShardedLayer:
    """A layer that is sharded, with its units: one for each dtype."""

    module: nn.Module
    units: Sequence[ShardedUnit]


@dataclass(frozen=True)
class StageShards:
    """The units of a stage: its ``layers`` in the order of execution, and the ``rest``, such as embedding and head."""

    layers: Sequence[ShardedLayer] = ()
    rest: Sequence[ShardedUnit] = ()

    @property
    def units(self) -> list[ShardedUnit]:
        """All of them, in the order in which a forward needs them."""
        return [*self.rest, *(unit for layer in self.layers for unit in layer.units)]

    @property
    def backwards(self) -> list[ShardedUnit]:
        """All of them, in the order in which all replicas reduce them."""
        return [*(unit for layer in reversed(self.layers) for unit in layer.units), *self.rest]


@dataclass
class _Step:
    """The present step. ``present`` has for each unit which gradients this rank had, ``before`` which it began with."""

    train: bool = False
    reduces: bool = False
    present: dict[ShardedUnit, list[bool]] = field(default_factory=dict)
    before: dict[ShardedUnit, list[bool]] = field(default_factory=dict)


class Changes(Protocol):
    """Changes of the model."""

    @property
    def has_moved(self) -> bool:
        """``True`` after a load, a move, a replacement or a change of ``requires_grad``, until ``settle``."""

    def settle(self) -> None:
        """Take the changes until now as known."""


class RankShards(ABC):
    """The units of this rank.

    Args:
        stages: the units of each local stage. Stages that use one parameter share its unit.
        exchanges: of the model with its replicas.
        changes: of the model that units follow.
        module: this rank's part of the model.

    Attributes:
        additions: the actions around compute actions.
        units: each once, in the order of the stages.
    """

    additions: Sequence[Addition]

    def __init__(
        self, stages: Mapping[int, StageShards], exchanges: ReplicaExchanges, changes: Changes, module: nn.Module
    ) -> None:
        self._module = module
        self._mesh = parallel_state.get_shard_mesh()
        self._programs: weakref.WeakSet[fx.GraphModule] = weakref.WeakSet()
        self._stages = stages
        self._exchanges = exchanges
        self._changes = changes
        self.units = list(dict.fromkeys(unit for stage in stages.values() for unit in stage.units))
        self._step = _Step()
        self._checks_steps = False

    def add_program(self, program: fx.GraphModule) -> None:
        """Put the parameters of the units into the containers of ``program`` too, which runs a stage."""
        if program in self._programs:
            return
        self._programs.add(program)
        for unit in self.units:
            unit.add_program(program)
        forward = program.forward
        program.forward = lambda *arguments: self._outside(forward(*arguments))

    def _outside(self, values: Any) -> Any:
        """Return ``values`` with copies of views of parameters, which would lose their memory."""
        return pytree.tree_map(self._outside_of_units, values)

    def _outside_of_units(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        storage = STORAGE_ADDRESS.of(leaf.untyped_storage())
        return leaf.clone() if any(storage in unit.storages for unit in self.units) else leaf

    def drop_cleared(self) -> None:
        """Drop gradients that ``no_sync()`` has kept on this replica, and that ``zero_grad`` has cleared since.

        Raises ``RuntimeError`` for other changes since, before anything is dropped.
        """
        for unit in self.units:
            unit.kept.check()
        for unit in self.units:
            unit.kept.drop_cleared()

    def begin(self, train: bool, reduces: bool, lines: Sequence[str], rounds: int = 0) -> None:
        """Begin a step; collective over the replicas. It ``reduces`` gradients unless they stay on each replica.

        Raises ``RuntimeError`` on all replicas where one is about to make another step, or has other ``lines`` or
        another number of ``rounds``, the training steps after which an optimizer has stepped.
        """
        self._follow()
        if parallel_state.get_shard_mesh() is not self._mesh:
            raise RuntimeError(
                "destroy_model_parallel() has ended the groups of this model's shards: build and wrap the model again."
            )
        kind = "a training step" if train else "an evaluation"
        name, details = f"gather of parameters for {kind}", [f"gradients are reduced: {reduces}", *lines]
        if parallel_state.get_replica_size() > 1:
            most, least = self._exchanges.start(name, details, [rounds, -rounds])()
            refuse_other_rounds(most, -least)
        # One replica has nothing to wait for.
        self._step = _Step(train, train and (reduces or parallel_state.get_replica_size() == 1))
        if self._step.reduces:
            for unit in self.units:
                self._step.before[unit] = [each.grad is not None for each in unit.parameters if each.requires_grad]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather all parameters for the block, in which no step runs; collective over the replicas."""
        self._follow()
        self._exchanges.begin("gather of all parameters")
        try:
            with torch.inference_mode(mode=False):
                for unit in self.units:
                    unit.start_gather()
                for unit in self.units:
                    unit.make_whole()
            yield
        finally:
            for unit in self.units:
                unit.free()

    def _follow(self) -> None:
        """Follow changes of the model since the last call."""
        if self._changes.has_moved:
            present = set(map(id, self._module.parameters()))
            for unit in self.units:
                unit.check_present(present)
                unit.follow()
            self._changes.settle()

    @property
    @abstractmethod
    def calls(self) -> Mapping[ActionKind, Callable[[Action], None]]:
        """The calls of the actions of ``additions``, by kind, for the compute action that each belongs to."""

    def finish(self) -> None:
        """End the step after its last action: a gradient that no replica has is ``None``; collective over them."""
        # A later call that fails before it begins leaves this step as it is.
        step, self._step = self._step, _Step()
        if not step.reduces:
            return
        for unit in self.units:
            unit.finish()
        reduced = [unit for unit in self.units if unit in step.present]
        trained = [p for unit in reduced for p in unit.parameters if p.requires_grad]
        present = [flag for unit in reduced for flag in step.present[unit]]
        before = [flag for unit in reduced for flag in step.before[unit]]
        anywhere = largest_of(present, parallel_state.get_replica_control_group())
        for parameter, is_anywhere, had_one in zip(trained, anywhere, before, strict=True):
            if not is_anywhere and not had_one:
                parameter.grad = None

    def keep(self) -> None:
        """End a step whose gradients stay on this replica until a step that reduces them.

        Until then an optimizer's step raises ``RuntimeError``.
        """
        if not self._checks_steps:
            self._checks_steps = True
            run_before_steps_of(self, RankShards._check_step)
        for unit in self.units:
            unit.mark_kept()

    def _check_step(self, optimizer: Optimizer) -> None:
        stepped = set(map(id, parameters_of(optimizer)))
        for unit in self.units:
            unit.kept.check_step(type(optimizer).__name__, stepped)

    def abandon(self) -> None:
        """Forget the present step, which has failed: gradients that are not reduced are dropped."""
        for unit in self.units:
            unit.abandon(self._step.train)
        self._step = _Step()

    def _reduce(self, unit: ShardedUnit) -> None:
        """Reduce the gradients of ``unit`` in the present step, unless they stay on this replica."""
        if self._step.reduces and unit.is_trained:
            present, known = unit.reduce(), self._step.present.get(unit)
            self._step.present[unit] = present if known is None else list(map(max, present, known))
        elif self._step.train:
            unit.convert()
