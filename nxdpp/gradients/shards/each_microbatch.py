"""Parameters that are gathered for each microbatch: in its forward and again in its backward.

One layer after the other is whole, and the next one is on its way::

    forward     wait 0 │ start 1 │ layer 0 │ free 0 │ wait 1 │ start 2 │ layer 1 │ free 1 ...
    backward    wait 1 │ start 0 │ layer 1 │ wait 0: reduce 1, free 1   │ layer 0 │ reduce 0, free 0

A backward reaches a layer when autograd runs the node that made its output. The layers behind it are then
at their end: of the nodes whose gradients are there, autograd runs the one that was made last. A weight-gradient of a
split backward has no such order, and gathers its whole stage.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from nxdpp.agreement.exchange import ReplicaExchanges
from nxdpp.gradients.shards.rank_shards import Changes, RankShards, ShardedLayer, StageShards
from nxdpp.gradients.shards.unit import ShardedUnit
from nxdpp.ground.torch_names import pytree
from nxdpp.ranks.faults import failure_watch
from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.lowering.additions import SHARDS_EACH_MICROBATCH


@dataclass
class _Pass:
    """A backward of ``layers``: layer ``reached`` is whole, and the layers behind it are at their end."""

    layers: Sequence[ShardedLayer]
    reached: int
    reduces: bool


class EachMicrobatch(RankShards):
    """Units that are whole only while they compute."""

    additions = SHARDS_EACH_MICROBATCH

    def __init__(
        self, stages: Mapping[int, StageShards], exchanges: ReplicaExchanges, changes: Changes, module: nn.Module
    ) -> None:
        super().__init__(stages, exchanges, changes, module)
        self._pass: _Pass | None = None
        self._is_backward = False
        # A trace calls layers too, with fake tensors.
        self._is_computing = False
        self._caches = True
        for stage in stages.values():
            for number, layer in enumerate(stage.layers):
                before = torch.compiler.disable(partial(self._before_forward, stage.layers, number))
                after = torch.compiler.disable(partial(self._after_forward, stage.layers, number))
                layer.module.register_forward_pre_hook(before, prepend=True)
                layer.module.register_forward_hook(after)

    @property
    def calls(self) -> Mapping[ActionKind, Callable[[Action], None]]:
        """The calls of ``additions``."""
        return {ActionKind.GATHER: self._gather, ActionKind.RESHARD: self._reshard}

    def add_program(self, program: fx.GraphModule) -> None:
        """Add ``program`` as ``RankShards`` does.

        Raises ``RuntimeError`` for one that reads a parameter of a layer outside of the layer, where it is not whole.
        """
        super().add_program(program)
        layers = (layer for stage in self._stages.values() for layer in stage.layers)
        inside = {id(each) for layer in layers for unit in layer.units for each in unit.parameters}
        read = [node.target for node in program.graph.nodes if node.op == "get_attr"]
        outside = [name for name in read if id(attrgetter(name)(program)) in inside]
        # Ranks of other stages have no such weight, and wait in the step.
        with failure_watch.reported():
            if outside:
                raise RuntimeError(
                    f"forward reads {outside[0]} outside of its layer, which fully_shard(reshard_after_forward=True) "
                    f"gathers only while the layer computes. Call fully_shard without reshard_after_forward=True."
                )

    def _gather(self, compute: Action) -> None:
        """Make whole what ``compute`` needs at once, and start to gather its first layer."""
        # Cached casts would stay whole, and their gradients would come with the ones of the first microbatch.
        self._caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        self._is_computing = True
        own, kind = self._stages[compute.stage], compute.kind
        at_once = own.units if kind is ActionKind.WEIGHT_GRADIENT else own.rest
        for unit in at_once:
            unit.start_gather()
        ahead = own.layers[:1] if kind is ActionKind.FORWARD else own.layers[-1:]
        for unit in (unit for layer in ahead for unit in layer.units):
            unit.start_gather()
        for unit in at_once:
            unit.make_whole()
        self._is_backward = kind is not ActionKind.FORWARD
        # A weight-gradient reaches the layers in any order, and finds all of them whole.
        if kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
            self._pass = _Pass(own.layers, len(own.layers), kind is not ActionKind.INPUT_GRADIENT)

    def _reshard(self, compute: Action) -> None:
        """Reduce and free what ``compute`` has left."""
        own, kind = self._stages[compute.stage], compute.kind
        walk, self._pass, self._is_backward = self._pass, None, False
        if kind is not ActionKind.FORWARD:
            if walk is not None:
                # Hooks of layers without a gradient have not run: all replicas gather and reduce in one order.
                self._reach(walk, -1)
            reduces = kind is not ActionKind.INPUT_GRADIENT
            for unit in (own.backwards if walk is None else own.rest) if reduces else ():
                self._reduce(unit)
            for unit in own.units if self._step.reduces and reduces else ():
                unit.check_reduced(
                    "a later microbatch uses a value of it, or code around it keeps one. Call fully_shard without "
                    "reshard_after_forward=True."
                )
        _free(own.units)
        self._end_action()

    def _end_action(self) -> None:
        if self._is_computing:
            torch.set_autocast_cache_enabled(self._caches)
        self._is_computing = self._is_backward = False
        self._pass = None

    def abandon(self) -> None:
        """Forget the present step, as ``RankShards.abandon`` does."""
        self._end_action()
        super().abandon()

    def _before_forward(self, layers: Sequence[ShardedLayer], number: int, module: nn.Module, arguments: Any) -> None:
        if not self._is_computing:
            return
        for unit in layers[number].units:
            unit.make_whole()
        # A backward that recomputes the layer has started the gather before it.
        if not self._is_backward:
            for unit in (unit for layer in layers[number + 1 : number + 2] for unit in layer.units):
                unit.start_gather()

    def _after_forward(
        self, layers: Sequence[ShardedLayer], number: int, module: nn.Module, arguments: Any, output: Any
    ) -> Any:
        if self._is_backward or not self._is_computing:
            return output
        output = self._outside(output)
        _free(layers[number].units)
        if torch.is_grad_enabled():
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(partial(self._before_backward, number))
        return output

    def _before_backward(self, number: int, gradient: torch.Tensor) -> None:
        """Hook of the output of layer ``number``: its backward comes next."""
        if self._pass is not None:
            self._reach(self._pass, number)

    def _reach(self, current: _Pass, number: int) -> None:
        """Go on to layer ``number``, layer by layer, and end the layers before it; -1 ends all."""
        layers = current.layers
        while current.reached > number:
            for unit in layers[current.reached].units if current.reached < len(layers) else ():
                if current.reduces:
                    self._reduce(unit)
                unit.free()
            current.reached -= 1
            if current.reached < 0:
                return
            for unit in layers[current.reached].units:
                unit.make_whole()
            for unit in layers[current.reached - 1].units if current.reached else ():
                unit.start_gather()


def _free(units: Sequence[ShardedUnit]) -> None:
    for unit in units:
        unit.free()
