"""A forward of the model over the ranks of a pipeline: each runs the model's own code, and its own modules in it.

::

    rank 0   embed  layers.0  layers.1 ──▶  .         .        .   norm  lm_head       . is a module of the other rank
    rank 1   .      .         .         ──▶  layers.2 layers.3     norm  lm_head ──▶ logits

The first forward shows which results of modules other ranks need: each result goes to all ranks with its values, as a
tensor that tells what follows from it. From then on a result goes only to the ranks that need it, and other ranks have
tensors without values. All ranks see the same code run, so they know all of this without a message.
"""

from collections import UserDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from transformers.cache_utils import Cache

from nxdpp.generation import absent
from nxdpp.generation.caches import CacheUpdate, advance, cache_among, sizes, updates
from nxdpp.generation.known_calls import CACHE, REMEDY, KnownCall, OutputRule, Plan, Plans, rule_of
from nxdpp.generation.leaves import StageLeaf, spine_parameters, stage_leaves, stage_of
from nxdpp.generation.messages import RankMessages
from nxdpp.ground.torch_names import CALL_WITH_HOOKS, COMPILED_CALL, PARAMETERS
from nxdpp.pipeline.partition.partition import Partition
from nxdpp.ranks.faults.board import board
from nxdpp.schedules.placement import ListedPlacement, Placement

_DIMENSIONS = 8
# torch calls it in place of a module with its hooks, as after ``compile()``.
_CALL = COMPILED_CALL.name


class StageCalls:
    """Forwards of one rank.

    Args:
        root: the whole model. Parameters of other ranks are on the meta device.
        partition: its stages.
        placement: the rank of each stage.
        messages: to the other ranks; the driver needs the outputs.
        device: the device of this rank.
        plans: what earlier forwards have shown, by their kind.
        head: the module that gives the logits, which only the driver gets.
    """

    def __init__(
        self,
        root: nn.Module,
        partition: Partition,
        placement: Placement | ListedPlacement,
        messages: RankMessages,
        device: torch.device,
        plans: Plans,
        head: nn.Module | None = None,
    ) -> None:
        self._head = head
        self._rank, self._driver, self._exchange = messages.rank, messages.driver, messages
        self._rank_of = rank_of = placement.rank_of
        self._ranks = frozenset(map(rank_of, range(partition.stages)))
        self._device = device
        self._plans = plans
        leaves = stage_leaves(root, partition)
        parameters = spine_parameters(root, partition, leaves)
        self._parameters = [leaf for leaf in parameters if {rank_of(stage) for stage in leaf.stages} != self._ranks]
        self._calls = [
            (leaf.module, _CALL, partial(self._call, leaf, CALL_WITH_HOOKS.of(leaf.module))) for leaf in leaves
        ]
        elsewhere = [leaf for leaf in leaves if self._rank not in map(rank_of, leaf.stages)]
        self._refusals = [(leaf.module, _CALL, partial(_refuse_call, leaf.name)) for leaf in elsewhere]
        self._plan: Plan = {}
        self._numbers: dict[str, int] = {}
        self._stage = 0
        self._signature: Any = None
        self._has_new = False
        self._touched: set[absent.Root] = set()

    def run(self, kind: Hashable, called: Callable[..., Any], arguments: Mapping[str, Any], signature: Any) -> Any:
        """Call ``called``, a module or a method of one, with ``arguments``, and return its output.

        Every rank calls it with equal arguments. Forwards of one ``kind`` run the same modules, and tell their
        dimensions apart alike. ``signature`` is hashable, and has the shapes of inputs. The driver's output has all
        values. Raises ``RuntimeError`` for code that needs values of another rank.
        """
        self._plan = self._plans.setdefault(kind, {})
        self._numbers, self._stage, self._signature, self._has_new = {}, 0, signature, False
        self._touched = set()
        with _attributes([*self._calls, *map(self._value, self._parameters)]):
            output = called(**arguments)
        if self._has_new:
            self._want(absent.roots_of(absent.leaves_in(output)), frozenset({self._driver}))
            self._want_shapes()
            output = absent.mapped(absent.untracked, output)
        if self._rank == self._driver:
            _refuse_absent(output, "returns it")
        return output

    def refused(self) -> AbstractContextManager[None]:
        """Refuse to run modules of other ranks outside of ``run``."""
        return _attributes(self._refusals)

    def _value(self, leaf: StageLeaf) -> tuple[nn.Module, str, Any]:
        """The value of a spine parameter for code of this rank, as the result of a module of its name."""
        key = leaf.name.rpartition(".")[2]
        parameter = PARAMETERS.of(leaf.module)[key]
        assert parameter is not None
        like = torch.empty(parameter.shape, device="meta")
        return leaf.module, key, self._result(leaf, lambda like: parameter.detach(), (like,), {})

    def _call(self, leaf: StageLeaf, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``leaf``. What it enters into dicts that layers share is a part of the result."""
        board.moved()
        shared = {name: value for name, value in kwargs.items() if isinstance(value, UserDict)}
        if not shared:
            return self._result(leaf, forward, args, kwargs)

        def with_entries(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
            own = {name: type(value)(kwargs[name]) for name, value in shared.items()}
            output = forward(*args, **{**kwargs, **own})
            given = {name: kwargs[name] for name in own}
            return output, {
                name: {key: value for key, value in own[name].items() if value is not given[name].get(key)}
                for name in own
            }

        plain = {name: dict(value) for name, value in shared.items()}
        output, entries = self._result(leaf, with_entries, args, {**kwargs, **plain})
        for name, value in shared.items():
            value.update(entries[name])
        return output

    def _result(
        self, leaf: StageLeaf, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``leaf``, receive its result, or return tensors without values."""
        number = self._numbers.get(leaf.name, 0)
        self._numbers[leaf.name] = number + 1
        stage = stage_of(leaf, self._stage)
        if leaf.layer_stage is not None:
            self._stage = stage + leaf.ends_stage
        known = self._plan.get((leaf.name, number))
        if known is None:
            return self._first_call(leaf, number, stage, forward, args, kwargs)
        if self._has_new:
            self._want(absent.roots_of(absent.leaves_in((args, kwargs))), known.executors)
        if self._rank in known.executors:
            if self._has_new:
                args, kwargs = absent.mapped(absent.untracked, (args, kwargs))
            output = self._run(leaf, forward, args, kwargs)
            if self._rank == known.home and len(known.executors) < len(self._ranks):
                self._send(known, known.check(leaf.name, output, _first_tensor(args, kwargs)))
            return output
        cache, first = cache_among((*args, *kwargs.values())), _first_tensor(args, kwargs)
        if cache is not None and first is not None:
            advance(cache, known.updates, first)
        return self._elsewhere(known, (leaf.name, number), first, cache)

    def _first_call(
        self,
        leaf: StageLeaf,
        number: int,
        stage: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run ``leaf`` on the rank of ``stage``, and give all ranks its result with its values, but no logits."""
        self._has_new = True
        roots = absent.roots_of(absent.leaves_in((args, kwargs)))
        home = self._rank_of(stage)
        # What follows only from the inputs, each rank that can computes itself.
        executors = frozenset({home} if roots else map(self._rank_of, leaf.stages))
        home = home if home in executors else min(executors)
        first = _first_tensor(args, kwargs)
        cache = cache_among((*args, *kwargs.values()))
        done: list[CacheUpdate] = []
        kind = absent.TrackedTensor
        if self._rank in executors:
            before = sizes(cache)
            args, kwargs = absent.mapped(absent.untracked, (args, kwargs))
            output = self._run(leaf, forward, args, kwargs)
            if first is not None and first.dim() > 1:
                done = updates(before, cache, first.shape[1])
            if self._rank == home:
                message = absent.mapped(lambda each: CACHE if isinstance(each, Cache) else each, output)
                for other in sorted(self._ranks - executors):
                    has_values = leaf.module is not self._head or other == self._driver
                    sent = message if has_values else absent.mapped(_without_values, message)
                    self._exchange.send_value((sent, done), other)
        else:
            received, done = self._exchange.receive_value(home)
            if cache is not None and first is not None:
                advance(cache, done, first)
            output = absent.mapped(lambda each: cache if each == CACHE else _on(each, self._device), received)
            if leaf.module is self._head and self._rank != self._driver:
                kind = absent.AbsentTensor
        self._want(roots, executors)
        template = absent.mapped(lambda each: rule_of(each, first), output)
        self._plan[leaf.name, number] = KnownCall(home, executors, template, done)
        return self._rooted(output, (leaf.name, number), kind)

    def _run(self, leaf: StageLeaf, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _refuse_absent((args, kwargs), f"gives it to {leaf.name} in this forward only")
        try:
            output = forward(*args, **kwargs)
        except Exception as error:
            error.add_note(f"in generate: {leaf.name} on pipeline rank {self._rank}")
            raise
        _refuse_absent(output, f"{leaf.name} reads it from a cache or an attribute")
        return output

    def _want(self, roots: frozenset[absent.Root], ranks: frozenset[int]) -> None:
        for name, number, index in roots:
            self._plan[name, number].want(index, ranks)

    def _want_shapes(self) -> None:
        """Send to all ranks what their code computes with, if they would not know its shape."""
        for name, number, index in self._touched:
            known = self._plan[name, number]
            if not known.rules[index].has_shape:
                known.want(index, self._ranks)

    def _rooted(self, output: Any, key: tuple[str, int], kind: type[absent.TrackedTensor]) -> Any:
        """``output`` of a call, with tensors that tell what follows from it."""
        index = -1

        def rooted(each: Any) -> Any:
            nonlocal index
            if not isinstance(each, torch.Tensor):
                return each
            index += 1
            return absent.tracked_as(each, frozenset({(*key, index)}), kind, self._touched)

        return absent.mapped(rooted, output)

    def _elsewhere(self, known: KnownCall, key: tuple[str, int], first: torch.Tensor | None, cache: Any) -> Any:
        """The result of a call that another rank runs: with the values that this rank needs."""
        index = -1

        def made(each: Any) -> Any:
            nonlocal index
            if not isinstance(each, OutputRule):
                return cache if each is CACHE else each
            index += 1
            if self._rank in known.wanted.get(index, ()):
                return self._receive(known, index, each)
            return each.placeholder(first, (*key, index), self._device)

        return absent.mapped(made, known.template)

    def _send(self, known: KnownCall, tensors: Sequence[torch.Tensor]) -> None:
        rules = known.rules
        for index in sorted(known.wanted):
            tensor = _dense(tensors[index])
            shape = list(tensor.size()), list(tensor.stride())
            expected = known.shapes.get(index, {}).get(self._signature)
            header = None
            if expected is not None:
                assert expected[0] == shape[0], "one size for each signature"
                if expected[1] != shape[1]:
                    tensor = torch.empty_strided(*expected, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
            else:
                numbers = [tensor.dim(), *shape[0], *shape[1], *[0] * (2 * (_DIMENSIONS - tensor.dim()))]
                header = torch.tensor(numbers, device="cpu")
                if rules[index].has_shape:
                    known.keep_shape(index, self._signature, shape)
            for destination in sorted(known.wanted[index]):
                if header is not None:
                    self._exchange.send(header, destination)
                self._exchange.send(tensor, destination)

    def _receive(self, known: KnownCall, index: int, rule: OutputRule) -> torch.Tensor:
        shape = known.shapes.get(index, {}).get(self._signature)
        if shape is None:
            header = self._exchange.receive([2 * _DIMENSIONS + 1], [1], torch.int64, known.home, on_host=True).tolist()
            shape = header[1 : 1 + header[0]], header[1 + header[0] : 1 + 2 * header[0]]
            if rule.has_shape:
                known.keep_shape(index, self._signature, shape)
        return self._exchange.receive(*shape, rule.dtype, known.home)


@contextmanager
def _attributes(given: Sequence[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Give values to attributes of modules. An attribute is found before a parameter of its name."""
    before = [vars(module).get(name) for module, name, _ in given]
    for module, name, value in given:
        vars(module)[name] = value
    try:
        yield
    finally:
        for (module, name, _), earlier in zip(given, before, strict=True):
            if earlier is None:
                del vars(module)[name]
            else:
                vars(module)[name] = earlier


def _refuse_call(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"generate over a pipeline: the model's generate calls {name} outside of the model's forward, and another rank "
        f"has it. {REMEDY}"
    )


def _refuse_absent(values: Any, reason: str) -> None:
    for value in absent.leaves_in(values):
        if isinstance(value, absent.AbsentTensor):
            raise absent.unknown_values(value.roots, reason)


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)


@dataclass(frozen=True)
class _LogitsElsewhere:
    """It stands for a tensor whose values only the driver gets."""

    size: tuple[int, ...]
    dtype: torch.dtype


def _without_values(value: Any) -> Any:
    return _LogitsElsewhere(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, _LogitsElsewhere):
        return torch.zeros(value.size, dtype=value.dtype, device=device)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy where its memory has gaps or overlaps."""
    if tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        return tensor
    return torch.empty_like(tensor).copy_(tensor)
