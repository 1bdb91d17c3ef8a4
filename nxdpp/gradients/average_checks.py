"""Checks, after an optimizer step, that the gradients of replicas were averaged: by the optimizer, or before."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.agreement.comparison import unequal
from nxdpp.agreement.exchange import check_replicas
from nxdpp.agreement.same_values import sample
from nxdpp.counted import counted
from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.step_hooks import run_after_steps, run_before_steps
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board


class ReplicaStepCheck:
    """Compares parameters over the replicas in steps 1, 2, 4, 8 ... of optimizers whose gradients may not be averaged.

    They are those of tensor-parallel layers in a loop of ``backward()``, which has to average by itself, and of
    pipelines with ``use_zero1_optimizer=True``. Those steps are collective over the replicas.
    """

    def __init__(self) -> None:
        # Whether a pipeline averages the gradients of its parameter, or leaves it to the optimizer.
        self._is_averaged = WeakIdKeyDictionary()
        self._steps = WeakIdKeyDictionary()
        self._before = WeakIdKeyDictionary()
        self._has_begun = False

    def begin(self) -> None:
        """Compare from now on: this process has a parameter of the first or the second kind."""
        if not self._has_begun:
            self._has_begun = True
            run_before_steps(self._note)
            run_after_steps(self._compare)

    def of_pipeline(self, parameters: Iterable[nn.Parameter], is_averaged: bool) -> None:
        """Leave out ``parameters`` of a pipeline that averages their gradients, or compare the others."""
        self._is_averaged.update(dict.fromkeys(parameters, is_averaged))
        if not is_averaged:
            self.begin()

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
            found = unequal(samples, parallel_state.get_replica_control_group())
        if found is None:
            return
        (before, after), (other_before, other_after) = found.values
        first, other = found.names("data-parallel rank")
        kind = type(optimizer).__name__
        if before != other_before:
            raise RuntimeError(
                f"{other} had other parameters than {first} before the first step of {kind}. Give torch.manual_seed "
                f"the same seed on all ranks before the model is built, and load the same checkpoint."
            )
        count = sum(one != another for one, another in zip(after, other_after, strict=True))
        is_handed_over = any(parameter in self._is_averaged for parameter in self._compared(optimizer))
        raise RuntimeError(
            f"{other} has other values than {first} in {count} of {counted(len(after), 'parameter')} after step "
            f"{number} of {kind}: the gradients of the data-parallel replicas were not averaged. "
            f"{_HANDED_OVER if is_handed_over else _LOOP}"
        )

    def _samples(self, optimizer: Optimizer) -> list[str]:
        if not parallel_state.model_parallel_is_initialized() or parallel_state.get_replica_size() == 1:
            return []
        return [sample(parameter).hex() for parameter in self._compared(optimizer)]

    def _compared(self, optimizer: Optimizer) -> list[nn.Parameter]:
        # Routers and other layers tell of experts, which each rank of an expert group has of its own.
        groups = optimizer.param_groups
        stepped = [p for g in groups for p in g["params"] if not self._is_averaged.get(p) and not is_of_experts(p)]
        ours = any(p in self._is_averaged or getattr(p, "tensor_model_parallel", False) for p in stepped)
        return stepped if ours else []


_HANDED_OVER = (
    "use_zero1_optimizer=True leaves it to the optimizer: set use_zero1_optimizer=False, or take one that averages."
)
_LOOP = (
    "Call nxdpp.parallel_layers.grads.bucket_allreduce_gradients([p.grad for p in model.parameters() if p.grad is not "
    "None]) after backward(), before clipping and step()."
)
replica_step_check = ReplicaStepCheck()


class Averaged(Protocol):
    """A pipelined model, and whether the gradients of its last training step are averaged."""

    is_averaged: bool


def _check_left_out_averages(parameters: Mapping[str, nn.Parameter], source: Callable[[], Averaged | None]) -> None:
    """Compare a sample of the parameters over the replicas, after optimizer steps with gradients of one replica.

    ``no_sync()`` leaves the average to a later step, and a program may forget that step, or average by itself. Those
    steps are collective over the replicas. The hook is removed with the last parameter.
    """
    names = WeakIdKeyDictionary({each: name for name, each in parameters.items()})

    def check(optimizer: Optimizer) -> None:
        if not len(names):
            end()
            return
        known = source()
        if known is None or known.is_averaged:
            return
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # The routers and the other layers tell of experts too, which each rank of an expert group has of its own.
        told = [each for each in stepped if each in names and not is_of_experts(each)]
        held = [f"values of {names[p]}: {sample(p).hex()}" for p in told]
        if not held:
            return
        try:
            check_replicas(held)
        except RuntimeError as error:
            raise RuntimeError(
                f"the data-parallel replicas have different parameters after a step of {type(optimizer).__name__}: the "
                f"last run_train was in no_sync(), and its gradients are those of each replica. Run the last batch of "
                f"an accumulation outside of no_sync(), or average before the optimizer's step "
                f"(nxdpp.parallel_layers.grads.bucket_allreduce_gradients)."
            ) from error

    end = run_after_steps(check)


def check_optimizers(
    parameters: Mapping[str, nn.Parameter], hands_over: bool, source: Callable[[], Averaged | None]
) -> None:
    """Have steps of optimizers checked from now on, unless there is one replica.

    ``hands_over``: the optimizer averages the gradients. ``source`` gives the object that knows whether they are
    averaged, and ``None`` once it is gone.
    """
    if parallel_state.get_replica_size() == 1:
        return
    if hands_over:
        replica_step_check.of_pipeline(parameters.values(), is_averaged=False)
    else:
        _check_left_out_averages(parameters, source)
