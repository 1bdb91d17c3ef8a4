"""Gradients averaged over the data-parallel replicas, whose parameters are verified before.

::

    run_train(...)              verify ─▶ begin, with the last backwards of the stages ─▶ finish
    in no_sync()                verify
    average_gradients()         verify ─▶ average

The parameters are verified in steps 1, 2, 4, 8, ... of the model, counted anew from a load or ``refresh()``: a program
may change them on each replica by itself.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.agreement.exchange import SAME_MODEL, ReplicaExchanges, check_replica_values, warn_of_equal_batches
from nxdpp.agreement.fingerprint import digest, parameter_lines
from nxdpp.agreement.same_values import sample
from nxdpp.counted import counted
from nxdpp.gradients.average import average_gradients
from nxdpp.gradients.average_checks import replica_step_check
from nxdpp.gradients.average_plan import LastBackward
from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.optimizer_agreement import OptimizerAgreement, refuse_other_rounds
from nxdpp.gradients.overlapped_average import AverageReport, OverlappedAverage
from nxdpp.gradients.shards.local_tensors import is_of_shards, is_sharded, local_rows
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board

_APART = (
    "The replicas had the same parameters {} ago. Since then the program has changed them on each replica by "
    "itself: an optimizer that steps in a backward hook, before the average of the gradients, or new values after "
    "different seeds. Step the optimizer after run_train, and draw new values after the same torch.manual_seed(...)."
)


class _Tied(Protocol):
    @property
    def parameters(self) -> list[nn.Parameter]: ...


class _InitialFacts(Protocol):
    origin: str | None


class _ComparedFacts(Protocol):
    loaded: bytes
    seed: int

    def lines(self) -> list[str]: ...


class RankParameters(Protocol):
    """The parameters of this rank, as ``ReplicaGradients`` reads them."""

    @property
    def module(self) -> nn.Module:
        """The module that has them."""

    @property
    def initial(self) -> _InitialFacts:
        """The origin of initial weights."""

    @property
    def compared(self) -> _ComparedFacts:
        """Settings, attributes and loads that the replicas must have alike."""

    @property
    def tied(self) -> _Tied:
        """Parameters whose gradients pipeline ranks sum after the backwards."""


class ReplicaGradients:
    """The gradients of this rank's parameters, and whether the ones of the last training step are averaged.

    ``is_left_out`` is ``True`` in ``no_sync()``. ``optimizers`` are the ones that step the parameters. Without ``mean``
    gradients are summed over the replicas.
    """

    def __init__(self, part: RankParameters, exchanges: ReplicaExchanges, mean: bool = True) -> None:
        self.is_left_out = False
        self._mean = mean
        self._replicas = parallel_state.get_replica_size()
        self._is_summed = False
        self._part = part
        self._module = part.module
        self.exchanges = exchanges
        self.is_averaged = True
        self._numbers = itertools.count(1)
        self._changed = False
        self._overlapped: OverlappedAverage | None = None
        self.optimizers = OptimizerAgreement(part.module, exchanges)
        # Parameters that were trained in no_sync() since the last average.
        self._waiting: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._is_later = self._is_waiting = self._is_begun = False

    @property
    def report(self) -> AverageReport:
        """Figures of the last average that began during a step."""
        return AverageReport(0, 0, 0.0) if self._overlapped is None else self._overlapped.report

    def verify(self, hashes: Sequence[int] = ()) -> None:
        """Verify in steps 1, 2, 4, 8, ... that the replicas have the same parameters; collective over them.

        In step 1 equal ``hashes`` of the batch are a warning. Raises ``RuntimeError`` for names, shapes or dtypes that
        differ from the first replica's, or values in a sample, and in step 1 for attributes.
        """
        if not (number := next(self._numbers)) & (number - 1):
            before = number // 2
            if not before:
                replica_step_check.of_pipeline(self._module.parameters(), is_averaged=True)
                self._compare(self._part.compared.lines())
                if self._replicas > 1:
                    self.exchanges.begin("comparison of batches")
                    with failure_watch.reported():
                        warn_of_equal_batches(hashes)
            else:
                self._compare(remedy=_APART.format(f"{before} step{'s' * (before > 1)}"))

    def check_values(self) -> None:
        """Raise ``RuntimeError`` for replicas with different parameters; collective over them."""
        self._compare(self._part.compared.lines())

    def is_in_any(self, name: str, value: bool) -> bool:
        """Return whether ``value`` is true in one of the replicas; collective over them, in the exchange ``name``."""
        return any(map(any, self.exchanges.gathered(name, [value])))

    def average(self) -> None:
        """Average ``.grad`` over the replicas; collective over them.

        Raises ``RuntimeError`` on all of them, where replicas are in different steps, for a second sum of the same
        gradients, and as ``verify`` does.
        """
        if any(map(is_sharded, self._module.parameters())):
            raise RuntimeError(
                "fully_shard reduces the gradients of several steps in the last of them: run that one outside of "
                "no_sync(), and leave average_gradients() out."
            )
        self._refuse_second_sum()
        if self._is_waiting:
            self._refuse_frozen()
        group, control = parallel_state.get_replica_group(), parallel_state.get_replica_control_group()
        number = board.training_steps()
        self.exchanges.begin("average of gradients", self._trained_names())
        notes = [number, -number, *self._rounds(), self._changed]
        average_gradients(self._replicated(), group, control, notes, self._check_of(number), self._mean)
        self.is_averaged = self._is_summed = True
        self._forget_waiting()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the average out of the training steps of the block."""
        before, self.is_left_out = self.is_left_out, True
        try:
            yield
        finally:
            self.is_left_out = before

    def begin_step(self, average: bool) -> None:
        """Begin a training step on this replica. With ``average`` the average is taken, unless it is left out.

        Raises ``RuntimeError`` for gradients that were summed over the replicas already.
        """
        if self._is_summed and not self._mean:
            self._refuse_second_sum()
        if self._is_waiting:
            self._refuse_frozen()
        self.is_averaged, self._is_later = average and not self.is_left_out, average and self._replicas > 1

    def _refuse_second_sum(self) -> None:
        """Raise ``RuntimeError`` where gradients are sums over the replicas: a second sum would count them again."""
        if self._mean or not self._is_summed or self._replicas == 1:
            return
        if any(parameter.grad is not None for parameter in self._replicated()):
            raise RuntimeError(
                "the gradients are sums over the data-parallel replicas already, and would be summed again. Call "
                "zero_grad() before the next step. To accumulate, run all steps but the last in no_sync()."
            )
        self._is_summed = False

    def _forget_waiting(self) -> None:
        self._is_waiting = False
        self._waiting.clear()

    def _refuse_frozen(self) -> None:
        """Raise ``RuntimeError`` for a frozen parameter whose gradients of ``no_sync()`` wait for the average."""
        frozen = [name for each, name in self._waiting.items() if each.grad is not None and not each.requires_grad]
        if frozen:
            raise RuntimeError(
                f"{counted(len(frozen), 'parameter was', 'parameters were')} frozen after a step in no_sync() "
                f"({frozen[0]} is the first), whose gradients are those of each replica: an average takes trained "
                "parameters only. Freeze them after a run_train outside of no_sync(), or set their .grad to None."
            )

    def check_averaged(self) -> None:
        """Raise ``RuntimeError`` where the gradients of the last training step are not averaged."""
        if not self.is_averaged and self._replicas > 1:
            raise RuntimeError(
                "the gradients of the last training step are not averaged over replicas, so each would clip by its own "
                "norm. Clip after a run_train outside of no_sync(). If the program has averaged them itself, call "
                "nxdpp.parallel_layers.clip_grad_norm(model.local_parameters(), max_norm)."
            )

    def before_last(self, stage: int) -> None:
        """Note that the last backward of ``stage`` begins."""
        if self._is_begun and self._overlapped is not None:
            self._overlapped.before_last(stage)

    def after_last(self, stage: int) -> None:
        """Note that the last backward of ``stage`` has ended."""
        if self._is_begun and self._overlapped is not None:
            self._overlapped.after_last(stage)

    def begin(self, last: Sequence[LastBackward]) -> None:
        """Begin the average of a step, which ``finish`` ends; nothing for one replica, and for a step without it.

        ``last`` has the last backward of each local stage. The errors of ``average`` are raised before a gradient is
        sent.
        """
        self._is_begun = self.is_averaged and self._replicas > 1
        if not self._is_begun:
            return
        number, modes = board.training_steps(), self._modes()
        if self._overlapped is None:
            control = parallel_state.get_replica_control_group()
            self._overlapped = OverlappedAverage(parallel_state.get_replica_group(), control, self._mean)

        def start(order: int) -> Callable[[], bool]:
            notes = [number, -number, *self._rounds(), int(self._changed), order, -order]
            end = self.exchanges.start("average of gradients during a step", [*modes, *self._trained_names()], notes)

            def agree() -> bool:
                *largest, last_order, negative_first = end()
                self._check_of(number)(largest)
                return last_order == -negative_first

            return agree

        # A parameter that is divided along the sequence gets the sum over tensor ranks after the step.
        parameters = self._replicated()
        divided = (each for each in parameters if getattr(each, "sequence_parallel_enabled", False))
        self._overlapped.begin(parameters, last, [*self._part.tied.parameters, *divided], start)

    def finish(self) -> None:
        """End the average that ``begin`` began, after the sums of tied weights; collective over the replicas."""
        if self._is_waiting and self.is_averaged:
            self._forget_waiting()
        elif self._is_later and not self.is_averaged:
            self._is_waiting = True
            named = self._module.named_parameters()
            self._waiting.update({p: name for name, p in named if p.requires_grad and not is_sharded(p)})
        if self.is_averaged and self._overlapped is not None:
            with failure_watch.reported():
                self._overlapped.finish()
            self._is_summed = True

    def follow(self) -> None:
        """Follow parameters that may have been replaced."""
        if self._overlapped is not None:
            self._overlapped.forget()

    def abandon(self) -> None:
        """Forget the average of a step that has failed."""
        if self._overlapped is not None:
            self._overlapped.abandon()

    def _replicated(self) -> list[nn.Parameter]:
        """The parameters of which each replica has all rows."""
        return [parameter for parameter in self._module.parameters() if not is_sharded(parameter)]

    def _check_of(self, number: int) -> Callable[[list[int]], None]:
        """Return the check of the numbers of all replicas, which raises as ``average`` does."""

        def check(largest: list[int]) -> None:
            last, first, most, least, changed = largest[0], -largest[1], largest[2], -largest[3], largest[4]
            if last != first:
                raise RuntimeError(
                    f"a data-parallel replica is in training step {first}, and another in training step {last}: this "
                    f"rank is in step {number}. Their gradients belong to different batches. Make each call of "
                    f"run_train on every rank, and enter no_sync() on every rank. If a program catches the error of a "
                    f"step, it must leave the step out on all ranks."
                )
            refuse_other_rounds(least, most)
            if changed:
                self._compare()
                self._changed, self._numbers = False, itertools.count(2)

        return check

    def lines_of_step(self) -> list[str]:
        """Lines that replicas must have alike in a training step: its number, modes and trained parameters."""
        loads = f"loads of state dicts: {self._part.compared.loaded.hex() or 'none'}"
        return [f"training step {board.training_steps()}", loads, *self._modes(), *self._trained_names()]

    def _rounds(self) -> tuple[int, int]:
        return self.optimizers.rounds, -self.optimizers.rounds

    def _modes(self) -> list[str]:
        """Lines with the modes of the step: dropout on only some replicas would train a different model."""
        modules = list(self._module.modules())
        training = sum(module.training for module in modules)
        kind = next((parameter.device.type for parameter in self._module.parameters()), "cpu")
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else "none"
        return [f"modules in training mode: {training} of {len(modules)}", f"autocast: {dtype}"]

    def _trained_names(self) -> list[str]:
        """Lines with the trained parameters: they are paired by their order."""
        return [f"trained {name}" for name, p in self._module.named_parameters() if p.requires_grad]

    def verify_again(self) -> None:
        """Verify the parameters again before the next average, on all replicas."""
        self._changed = True

    def _compare(self, lines: Sequence[str] = (), remedy: str = SAME_MODEL) -> None:
        if self._replicas == 1:
            return
        self.exchanges.begin("comparison of parameters")
        # Within a step some are whole, and a hash would fix their memory.
        named = list(self._module.named_parameters())
        parameters = [(name, each) for name, each in named if not is_of_shards(each)]
        sharded = {name: each for name, each in named if is_sharded(each.data)}
        with failure_watch.reported():
            facts = [*lines, *parameter_lines(parameters)]
            alike, experts = ([(n, p) for n, p in parameters if is_of_experts(p) is kind] for kind in (False, True))
            check_replica_values(alike, self._part.initial.origin, self._part.compared.seed, facts, remedy)
            self._compare_rows(sharded, remedy)
            if experts:
                self._compare_parts(
                    "comparison of experts", parallel_state.get_expert_model_parallel_rank(), experts, remedy
                )

    def _compare_rows(self, sharded: Mapping[str, nn.Parameter], remedy: str) -> None:
        """Compare a sample of the rows of each sharded parameter with other replicas that have the same rows."""
        mesh = parallel_state.get_shard_mesh() if sharded else None
        if mesh is None or mesh.ndim == 1:
            return
        rows = [(name, local_rows(each)) for name, each in sharded.items()]
        self._compare_parts("comparison of the rows of shards", mesh.get_local_rank(-1), rows, remedy)

    def _compare_parts(self, exchange: str, place: int, parts: Sequence[tuple[str, torch.Tensor]], remedy: str) -> None:
        """Compare a sample of ``parts`` of parameters, those at ``place``, with other replicas that have these too."""
        own = digest("".join(f"{name} {sample(each).hex()}" for name, each in parts if not each.is_meta).encode())
        found = self.exchanges.gathered(exchange, [place, int.from_bytes(own, "little") >> 12])
        first: dict[float, tuple[int, float]] = {}
        for replica, (there, number) in enumerate(found):
            earlier, expected = first.setdefault(there, (replica, number))
            if number != expected:
                raise RuntimeError(
                    f"data-parallel rank {replica} has other values than data-parallel rank {earlier} in the parts "
                    f"that both have of {counted(len(parts), 'parameter')} ({exchange}). {remedy}"
                )
