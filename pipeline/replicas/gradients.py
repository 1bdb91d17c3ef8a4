"""Gradients averaged over the data-parallel replicas, whose parameters are verified before."""

from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn

from nxdpp.parallel_layers import failure_watch, parallel_state
from nxdpp.parallel_layers.gradient_average import average_gradients
from nxdpp.parallel_layers.overlapped_average import AverageReport, LastBackward, OverlappedAverage
from nxdpp.pipeline.agreement.fingerprint import parameter_lines
from nxdpp.pipeline.agreement.replicas import check_replica_values
from nxdpp.pipeline.replicas.exchange import ReplicaExchanges


class ReplicaGradients:
    """The gradients of this rank's parameters.

    Args:
        module: the local modules.
        exchanges: those with the data-parallel replicas.
    """

    def __init__(self, module: nn.Module, exchanges: ReplicaExchanges) -> None:
        self._module = module
        self._exchanges = exchanges
        self._verified = False
        self._changed = False
        self._overlapped: OverlappedAverage | None = None

    @property
    def report(self) -> AverageReport:
        """Figures of the last average that began during a step."""
        return AverageReport(0, 0, 0.0) if self._overlapped is None else self._overlapped.report

    def verify(self, origin: str | None, seed: int, lines: Sequence[str] = ()) -> None:
        """Verify once that the replicas have the same parameters and values; collective over them.

        Args:
            origin: a line about the origin of the values, the same on each replica.
            seed: ``torch.initial_seed()`` when this rank wrapped the model, for the message.
            lines: other facts about the model that are equal on all replicas.

        Raises:
            RuntimeError: for other names, shapes or dtypes than the first replica has, or other values in a sample.
        """
        if not self._verified:
            self._compare(origin, seed, lines)
            self._verified = True

    def average(self, origin: str | None, seed: int, number: int) -> None:
        """Average ``.grad`` over the replicas; collective over them.

        Args:
            origin, seed: as for ``verify``, after ``verify_again`` on any replica.
            number: of this rank's training step.

        Raises:
            RuntimeError: on all of them, where replicas are in different steps, and as ``verify`` does.
        """
        group, control = parallel_state.get_data_parallel_group(), parallel_state.get_data_parallel_control_group()
        check = self._check_of(origin, seed, number)
        self._exchanges.begin("average of gradients", self._trained_names())
        average_gradients(self._module.parameters(), group, control, [number, -number, self._changed], check)

    def begin(
        self,
        origin: str | None,
        seed: int,
        number: int,
        last: Sequence[LastBackward],
        tied: Collection[nn.Parameter],
    ) -> OverlappedAverage | None:
        """Begin the average of a step, which ``finish`` ends. Returns ``None`` for one replica.

        Args:
            origin, seed, number: as for ``average``. The same errors are raised before a gradient is sent.
            last: the last backward of each local stage.
            tied: weights whose gradients are summed over stages before they are averaged.
        """
        if parallel_state.get_data_parallel_size() == 1:
            return None
        if self._overlapped is None:
            control = parallel_state.get_data_parallel_control_group()
            self._overlapped = OverlappedAverage(parallel_state.get_data_parallel_group(), control)

        def agree(order: int) -> bool:
            control = parallel_state.get_data_parallel_control_group()
            self._exchanges.begin("average of gradients during a step", self._trained_names())
            notes = torch.tensor([number, -number, int(self._changed), order, -order])
            dist.all_reduce(notes, dist.ReduceOp.MAX, control)
            *largest, last_order, negative_first = notes.tolist()
            self._check_of(origin, seed, number)(largest)
            return bool(last_order == -negative_first)

        # A parameter that is divided along the sequence gets the sum over tensor ranks after the step.
        held_back = [*tied, *(p for p in self._module.parameters() if getattr(p, "sequence_parallel_enabled", False))]
        self._overlapped.begin(list(self._module.parameters()), last, held_back, agree)
        return self._overlapped

    def finish(self) -> None:
        """End the average that ``begin`` began, after the sums of tied weights; collective over the replicas."""
        if self._overlapped is not None:
            self._overlapped.finish()

    def follow(self) -> None:
        """Follow parameters that may have been replaced."""
        if self._overlapped is not None:
            self._overlapped.forget()

    def abandon(self) -> None:
        """Forget the average of a step that has failed."""
        if self._overlapped is not None:
            self._overlapped.abandon()

    def _check_of(self, origin: str | None, seed: int, number: int) -> Callable[[list[int]], None]:
        """Return the check of the numbers of all replicas, which raises as ``average`` does."""

        def check(largest: list[int]) -> None:
            last, first, changed = largest[0], -largest[1], largest[2]
            if last != first:
                raise RuntimeError(
                    f"a data-parallel replica is in training step {first}, and another in training step {last}: this "
                    f"rank is in step {number}. Their gradients belong to different batches. Make each call of "
                    f"run_train on every rank, and enter no_sync() on every rank. If a program catches the error of a "
                    f"step, it must leave the step out on all ranks."
                )
            if changed:
                self._compare(origin, seed)
                self._changed = False

        return check

    def _trained_names(self) -> list[str]:
        """Lines with the trained parameters: they are paired by their order."""
        return [f"trained {name}" for name, p in self._module.named_parameters() if p.requires_grad]

    def verify_again(self) -> None:
        """Verify the parameters again before the next average, on all replicas."""
        self._changed = True

    def _compare(self, origin: str | None, seed: int, lines: Sequence[str] = ()) -> None:
        self._exchanges.begin("comparison of parameters")
        parameters = list(self._module.named_parameters())
        group = parallel_state.get_data_parallel_group()
        with failure_watch.reported():
            check_replica_values(parameters, origin, group, seed, [*lines, *parameter_lines(parameters)])
