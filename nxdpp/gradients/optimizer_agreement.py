"""Agreement of the ranks' optimizers: all step after a training step or none does, and all have the same options.

::

    steps      of this rank's optimizers      two numbers in messages that a training step sends anyway
    options    in training steps 1, 2, 4 ...  gathered from all ranks of the model, with those of clip_grad_norm_

Ranks of one stage have the same groups. Groups of other stages may have options of their own (rates by layer). What
they share is what the constructor was given for all groups (``defaults``), and how equal options change: a scheduler
that only some ranks step makes them different.
"""

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.agreement.exchange import ReplicaExchanges
from nxdpp.agreement.fingerprint import canonical
from nxdpp.agreement.step_verifier import OF_A_PART, STEP_ON_ALL
from nxdpp.counted import counted
from nxdpp.gradients.replaced_parameters import live_optimizers, parameters_of
from nxdpp.gradients.step_hooks import run_before_steps_of
from nxdpp.ranks import parallel_state
from nxdpp.ranks.exchange import Exchange
from nxdpp.ranks.faults import failure_watch

_logger = logging.getLogger(__name__)

# Of all models of this process; their optimizers that have stepped.
_agreements: "weakref.WeakSet[OptimizerAgreement]" = weakref.WeakSet()
_stepped = WeakIdKeyDictionary()

# How a step is computed, and names of one rank.
_NO_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
Options = dict[str, str]


class _OptimizerFacts(NamedTuple):
    """One optimizer of a rank: class, options for all groups, and of each group: before its first step, and now."""

    kind: str
    defaults: Options
    groups: list[tuple[Options, Options]]


class _RankOptimizers(NamedTuple):
    """The facts that a rank tells the others."""

    rank: int
    stage: int
    rounds: int
    optimizers: list[_OptimizerFacts]
    clipping: tuple[float, float] | None = None
    is_trained: bool = True
    dtype: torch.dtype = torch.float32
    is_sure: bool = True

    @property
    def kinds(self) -> list[str]:
        return [each.kind for each in self.optimizers]


class OptimizerAgreement:
    """The optimizers that step parameters of ``module``, this rank's part of a model.

    Attributes:
        rounds: training steps after which one of them has stepped.
        state: twice the number of optimizers, plus 1 if one has stepped since the last training step.
        clipping: ``max_norm`` and ``norm_type`` of the last ``clip_grad_norm_``.
    """

    def __init__(self, module: nn.Module, exchanges: ReplicaExchanges) -> None:
        self.rounds = 0
        self._module = module
        self._exchanges = exchanges
        self.state = 0
        self.clipping: tuple[float, float] | None = None
        self._steps = 0
        self._has_warned = False
        self._widest = torch.float32
        # The number of groups of each optimizer when it was looked at, and whether it is one of this model.
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._first: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._known: list[weakref.ref[Optimizer]] = []
        # Those of models before this one, of which a rank may have no parameters either.
        self._foreign: WeakIdKeyDictionary = WeakIdKeyDictionary(_stepped)
        _agreements.add(self)
        run_before_steps_of(self, OptimizerAgreement.note)

    def note(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer`` is about to step."""
        groups = getattr(optimizer, "param_groups", [])
        _stepped[optimizer] = True
        if self._seen.get(optimizer, (0, False)) != (len(groups), True) and not self._is_new_one(optimizer, groups):
            return
        self.rounds += not self.state % 2
        self.state |= 1

    def begin_step(self) -> None:
        """Begin a training step that all ranks of the pipeline have verified; collective over the model's ranks.

        Raises ``RuntimeError`` on all of them for different options.
        """
        self.state &= ~1
        self._steps += 1
        if self._steps & (self._steps - 1) or dist.get_world_size() == 1:
            return
        self._known = [reference for reference in self._known if reference() is not None]
        is_trained = any(parameter.requires_grad for parameter in self._module.parameters())
        if not self._known and is_trained:
            # Those that this rank has not stepped yet; one whose constructor failed has no groups.
            for optimizer in live_optimizers():
                if groups := getattr(optimizer, "param_groups", []):
                    self._is_new_one(optimizer, groups)
        self.state = 2 * len(self._known)
        ranks = self._everyones("comparison of optimizers", is_trained)
        with failure_watch.reported():
            _compare(ranks)
        if not self._has_warned:
            self._has_warned = _warn_of_untrained(ranks)

    def note_clipping(self, max_norm: float, norm_type: float, dtype: torch.dtype) -> torch.dtype:
        """Note a ``clip_grad_norm_`` before it changes gradients; the first one is collective over the model's ranks.

        Returns the widest ``dtype`` of them in the first call, or of this rank. Raises ``RuntimeError`` on all of them
        for different numbers in the first call.
        """
        is_first, self.clipping = self.clipping is None, (max_norm, norm_type)
        if is_first and dist.get_world_size() > 1:
            ranks = self._everyones("comparison of clipping", dtype=dtype)
            with failure_watch.reported():
                for rank in ranks:
                    _refuse_other_clipping(ranks[0], rank)
            self._widest = max((rank.dtype for rank in ranks), key=lambda each: each.itemsize)
        return max(self._widest, dtype, key=lambda each: each.itemsize)

    def _everyones(
        self, name: str, is_trained: bool = True, dtype: torch.dtype = torch.float32
    ) -> list[_RankOptimizers]:
        """Return the facts of the model's ranks in the exchange ``name``; collective over them."""
        self._exchanges.begin(name)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        has_empty = any(not parameters_of(optimizer) for optimizer in self._alive())
        # One without parameters may be of any model.
        is_sure = self.rounds > 0 or not has_empty or len(_agreements) == 1
        facts, clipping = self._facts(), self.clipping
        own = _RankOptimizers(dist.get_rank(), stage, self.rounds, facts, clipping, is_trained, dtype, is_sure)
        with failure_watch.reported():
            return Exchange(
                parallel_state.get_pipeline_control_group(),
                parallel_state.get_replica_control_group(),
                parallel_state.get_tensor_control_group(),
            ).gather(own)

    def _alive(self) -> list[Optimizer]:
        return [optimizer for reference in self._known if (optimizer := reference()) is not None]

    def _is_new_one(self, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Look whether ``optimizer`` has a parameter of the model, and then know it.

        Without any parameter it is the optimizer of a part of a model that other ranks have.
        """
        # Without the listing of the module itself, which follows replacements and may refuse one, outside of a step.
        modules = (module for _, module in nn.Module.named_modules(self._module))
        own = {id(each) for module in modules for _, each in nn.Module.named_parameters(module, recurse=False)}
        given = [id(parameter) for group in groups for parameter in group["params"]]
        is_own = any(each in own for each in given) or (not given and optimizer not in self._foreign)
        self._seen[optimizer] = len(groups), is_own
        if is_own and all(reference() is not optimizer for reference in self._known):
            self._known.append(weakref.ref(optimizer))
            self._first[optimizer] = [_options(group) for group in groups]
            self.state += 2
        return is_own

    def _facts(self) -> list[_OptimizerFacts]:
        facts = []
        for optimizer in self._alive():
            now = [_options(group) for group in optimizer.param_groups]
            first = self._first[optimizer]
            first.extend(now[len(first) :])
            kind = type(optimizer).__name__
            defaults = _options(getattr(optimizer, "defaults", {}))
            facts.append(_OptimizerFacts(kind, defaults, list(zip(first, now, strict=False))))
        return facts


def _options(given: Mapping[str, Any]) -> Options:
    plain = {name: value for name, value in given.items() if name not in _NO_OPTIONS}
    return {
        name: canonical(value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value)
        for name, value in plain.items()
    }


def _compare(ranks: Sequence[_RankOptimizers]) -> None:
    """Raise ``RuntimeError`` for optimizers with other options than those of an earlier rank."""
    firsts: dict[tuple[Any, ...], _RankOptimizers] = {}
    is_sure = all(rank.is_sure for rank in ranks)
    for rank in ranks:
        refuse_other_rounds(firsts.setdefault((rank.stage,), rank).rounds, rank.rounds)
        _refuse_other_clipping(ranks[0], rank)
        # Ranks of one stage have equal groups; other stages have other parameters, and maybe none.
        of_stage = firsts.setdefault((rank.stage, *rank.kinds), rank)
        of_model = firsts.setdefault(tuple(rank.kinds), rank) if is_sure else of_stage
        for number, facts in enumerate(rank.optimizers):
            _refuse(facts.kind, of_model, rank, of_model.optimizers[number].defaults, facts.defaults, _CONSTRUCTOR)
            theirs = of_stage.optimizers[number].groups
            for (_, first), (_, second) in zip(theirs, facts.groups, strict=False):
                _refuse(facts.kind, of_stage, rank, first, second, _GROUPS)
            for first, second in _changed_apart(of_model.optimizers[number].groups, facts.groups):
                _refuse(facts.kind, of_model, rank, first, second, _GROUPS)


_CONSTRUCTOR = (
    "Give the same options on every rank; options for some layers go into groups: [{'params': [...], 'lr': ...}, ...]. "
    f"{OF_A_PART}"
)
_GROUPS = "Change options on every rank alike: call scheduler.step() on all of them, with the same arguments."


def _changed_apart(
    one: Iterable[tuple[Options, Options]], other: Iterable[tuple[Options, Options]]
) -> list[tuple[Options, Options]]:
    """Return the present options of groups that had the same options at first, where all of a rank's are alike."""
    there, here = _present(one), _present(other)
    pairs = [(there[key], here[key]) for key in there if key in here]
    return [(first[0], second[0]) for first, second in pairs if len(first) == len(second) == 1]


def _present(groups: Iterable[tuple[Options, Options]]) -> dict[str, list[Options]]:
    found: dict[str, list[Options]] = {}
    for first, now in groups:
        known = found.setdefault(repr(sorted(first.items())), [])
        if now not in known:
            known.append(now)
    return found


def refuse_other_rounds(one: int, other: int) -> None:
    """Raise ``RuntimeError`` for two ranks with the same parameters and with different ``rounds``."""
    if one != other:
        raise RuntimeError(
            f"an optimizer has stepped after {counted(min(one, other), 'training step')} on a rank, and after "
            f"{max(one, other)} on another one with the same parameters, a data-parallel replica: they would go apart. "
            f"{STEP_ON_ALL}"
        )


def _warn_of_untrained(ranks: Sequence[_RankOptimizers]) -> bool:
    """Warn of stages whose parameters no optimizer steps, while one steps those of another stage."""
    stepped = sorted({rank.stage for rank in ranks if rank.rounds})
    without = sorted({rank.stage for rank in ranks if rank.is_trained} - {rank.stage for rank in ranks if rank.kinds})
    if not stepped or not without:
        return False
    if dist.get_rank() == 0:
        _logger.warning(
            "no optimizer has parameters of pipeline rank %s, which require gradients and keep their values, and an "
            "optimizer steps those of pipeline rank %s. Make the optimizer on every rank, from parameters() of the "
            "wrapped model. If these layers are not to be trained, freeze them in the model that was wrapped: "
            "requires_grad_(False).",
            ", ".join(map(str, without)),
            ", ".join(map(str, stepped)),
        )
    return True


def _refuse_other_clipping(one: _RankOptimizers, other: _RankOptimizers) -> None:
    if one.clipping != other.clipping:
        raise RuntimeError(
            f"clip_grad_norm_ {_clipping(other)}, and {_clipping(one)}: each rank would scale its part of the "
            f"gradients by a factor of its own. Clip on every rank, by the same numbers."
        )


def _clipping(rank: _RankOptimizers) -> str:
    last = "last had max_norm={:g}, norm_type={:g}".format(*rank.clipping) if rank.clipping else "was never called"
    return f"{last} on rank {rank.rank} (pipeline rank {rank.stage})"


def _refuse(
    kind: str, one: _RankOptimizers, other: _RankOptimizers, first: Options, second: Options, remedy: str
) -> None:
    different = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    if different:
        there = ", ".join(f"{name}={first.get(name, 'not given')}" for name in different)
        here = ", ".join(f"{name}={second.get(name, 'not given')}" for name in different)
        raise RuntimeError(
            f"{kind} has other options on rank {other.rank} (pipeline rank {other.stage}): {here}, than on rank "
            f"{one.rank} (pipeline rank {one.stage}): {there}. One process trains with one of them. {remedy}"
        )
