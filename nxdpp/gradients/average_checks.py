"""Checks, after an optimizer step, that the gradients of replicas were averaged: by the optimizer, or before."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.agreement.comparison import unequal
from nxdpp.agreement.replicas import check_replicas
from nxdpp.agreement.same_values import sample
from nxdpp.gradients.step_hooks import run_after_steps, run_before_steps
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board


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


class TensorLayerCheck:
    """Compares the parameters of replicas in steps 1, 2, 4, 8 ... of optimizers over tensor-parallel layers.

    A loop of ``backward()`` averages the gradients by itself, or forgets it. ``run_train`` averages: its parameters are
    left out. Those steps are collective over the replicas.
    """

    def __init__(self) -> None:
        self._pipelined = WeakIdKeyDictionary()
        self._steps = WeakIdKeyDictionary()
        self._before = WeakIdKeyDictionary()
        self._is_begun = False

    def begin(self) -> None:
        """Compare from now on: this process has a tensor-parallel layer."""
        if not self._is_begun:
            self._is_begun = True
            run_before_steps(self._note)
            run_after_steps(self._compare)

    def leave_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave out ``parameters``, which a pipeline trains."""
        self._pipelined.update(dict.fromkeys(parameters, True))

    def _note(self, optimizer: Optimizer) -> None:
        if optimizer not in self._steps:
            self._before[optimizer] = self._samples(optimizer)

    def _compare(self, optimizer: Optimizer) -> None:
        number = self._steps.get(optimizer, 0) + 1
        self._steps[optimizer] = number
        if number & (number - 1):
            return
        samples = self._before.pop(optimizer, []), self._samples(optimizer)
        if not samples[1]:
            return
        with board.call("the comparison of replicas"), failure_watch.reported():
            found = unequal(samples, parallel_state.get_data_parallel_control_group())
        if found is None:
            return
        (before, after), (other_before, other_after) = found.values
        first, other = found.names("data-parallel rank")
        if before != other_before:
            raise RuntimeError(
                f"{other} had other parameters than {first} before the first step of {type(optimizer).__name__}. Give "
                f"torch.manual_seed the same seed on all ranks before the model is built, and load the same checkpoint."
            )
        count = sum(one != another for one, another in zip(after, other_after, strict=True))
        raise RuntimeError(
            f"{other} has other values than {first} in {count} of {len(after)} parameters after step {number} of "
            f"{type(optimizer).__name__}: the gradients of the data-parallel replicas were not averaged. Call "
            f"nxdpp.parallel_layers.grads.bucket_allreduce_gradients([p.grad for p in model.parameters() if p.grad is "
            f"not None]) after backward(), before clipping and step()."
        )

    def _samples(self, optimizer: Optimizer) -> list[str]:
        """A hash of each parameter of ``optimizer`` without a pipeline; empty without tensor-parallel ones."""
        if not parallel_state.model_parallel_is_initialized() or parallel_state.get_data_parallel_size() == 1:
            return []
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p not in self._pipelined]
        is_divided = any(getattr(parameter, "tensor_model_parallel", False) for parameter in stepped)
        return [sample(parameter).hex() for parameter in stepped] if is_divided else []


tensor_layer_check = TensorLayerCheck()
