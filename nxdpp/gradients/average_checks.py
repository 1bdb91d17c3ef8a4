"""Checks, after an optimizer step, that the gradients of replicas were averaged: by the optimizer, or before."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.agreement.replicas import check_replicas
from nxdpp.agreement.same_values import sample
from nxdpp.gradients.step_hooks import run_after_steps
from nxdpp.ranks import parallel_state


class FirstStepCheck:
    """Compares a sample of the parameters over the replicas, after the first step of each optimizer that changes some.

    The first steps of a warm-up may have a learning rate of 0, which shows nothing. The parameters of an optimizer are
    compared until one of them changes. Those steps are collective over ``group``. The hook on optimizers' steps
    ends in the step after the last comparison, or once the model is gone.

    Args:
        parameters: this rank's, by name, before the step.
        group: the data-parallel ranks that have the same parameters.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        trained = {name: each for name, each in parameters.items() if each.requires_grad}
        # The hook may outlive the model: an id could then belong to a parameter of another model.
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary({each: name for name, each in trained.items()})
        self._before = {name: sample(parameter) for name, parameter in trained.items()}
        self._group = group
        self._end = run_after_steps(self._check)

    def _check(self, optimizer: Optimizer) -> None:
        if not len(self._names):
            self._end()
            return
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        held = {self._names[parameter]: sample(parameter) for parameter in stepped if parameter in self._names}
        if not held:
            return
        try:
            check_replicas([f"values of {name}: {known.hex()}" for name, known in held.items()], self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"use_zero1_optimizer=True leaves the average of gradients over data-parallel replicas to the "
                f"optimizer. After the first step of {type(optimizer).__name__} the replicas have different "
                f"parameters: it does not average. Set use_zero1_optimizer=False, or take an optimizer that does."
            ) from error
        if any(known != self._before[name] for name, known in held.items()):
            for parameter in stepped:
                self._names.pop(parameter, None)


class Averaged(Protocol):
    """Pipelined model."""

    @property
    def is_averaged(self) -> bool:
        """``True`` if the gradients of the last training step are averaged."""
        ...


class LeftOutAverageCheck:
    """Compares a sample of the parameters over the replicas, after optimizer steps with gradients of one replica.

    ``no_sync()`` leaves the average to a later step, and a program may forget that step, or average by itself. Those
    steps are collective over ``group``. The hook is removed with the last parameter.

    Args:
        parameters: this rank's, by name.
        group: the data-parallel ranks that have the same parameters.
        source: gives the object that knows whether the gradients are averaged, and ``None`` once it is gone.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup, source: Callable[[], Averaged | None]
    ) -> None:
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary({each: name for name, each in parameters.items()})
        self._group = group
        self._source = source
        self._end = run_after_steps(self._check)

    def _check(self, optimizer: Optimizer) -> None:
        if not len(self._names):
            self._end()
            return
        source = self._source()
        if source is None or source.is_averaged:
            return
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        held = [f"values of {self._names[p]}: {sample(p).hex()}" for p in stepped if p in self._names]
        if not held:
            return
        try:
            check_replicas(held, self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"the data-parallel replicas have different parameters after a step of {type(optimizer).__name__}: the "
                f"last run_train was in no_sync(), and its gradients are those of each replica. Run the last batch of "
                f"an accumulation outside of no_sync(), or average before the optimizer's step "
                f"(nxdpp.parallel_layers.grads.bucket_allreduce_gradients)."
            ) from error


OptimizerCheck = FirstStepCheck | LeftOutAverageCheck


def check_optimizers(
    parameters: Mapping[str, nn.Parameter], hands_over: bool, source: Callable[[], Averaged | None]
) -> OptimizerCheck | None:
    """Have steps of optimizers checked from now on; ``None`` for one replica.

    ``hands_over`` is ``use_zero1_optimizer``. The rest is as for ``LeftOutAverageCheck``.
    """
    if parallel_state.get_data_parallel_size() == 1:
        return None
    group = parallel_state.get_data_parallel_group()
    return FirstStepCheck(parameters, group) if hands_over else LeftOutAverageCheck(parameters, group, source)
