"""Gradients of replicated parameters under sequence parallelism, summed over the tensor group.

A norm between sequence-parallel layers sees a part of the sequence on each rank. So does the bias of a row-parallel
layer. Their gradients cover only this part. The parameters are marked (``sequence_parallel_enabled``), and their
gradients are added up once a step::

    before    rank 0: G         rank 1: G            (equal, from an earlier accumulation)
    step      rank 0: a         rank 1: b            (first and second half of the sequence)
    after     rank 0: G+(a+b)   rank 1: G+(a+b)

Hooks of such a gradient see the sum of each microbatch (``held_hooks``).

``run_train`` and ``train_step`` do it by themselves. Your own loop calls ``allreduce_sequence_parallel_gradients``
before the optimizer's step.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.gradients.gradient_dtype import gradient_dtype, zero_gradient
from nxdpp.gradients.held_hooks import HeldHooks, count_hooks
from nxdpp.gradients.shards.local_tensors import local_rows, with_rows
from nxdpp.ranks import parallel_state
from nxdpp.tensor.collectives import all_reduce
from nxdpp.tensor.tensor_attributes import is_sequence_parallel, mark_again

# Parameters whose gradients a pipeline adds up.
_summed_in_steps = WeakIdKeyDictionary()


def allreduce_sequence_parallel_gradients(parameters: Iterable[torch.Tensor] | Optimizer) -> None:
    """Sum the gradients of marked parameters over the tensor group; collective over it.

    For loops without a pipeline, once before each optimizer step. Parameters of a pipeline, whose steps do it, are left
    out, so that a call after ``run_train`` changes nothing.

    Args:
        parameters: the model's parameters, or its optimizer; the same on all ranks of the group.
    """
    if isinstance(parameters, Optimizer):
        parameters = [parameter for group in parameters.param_groups for parameter in group["params"]]
    sum_gradients([parameter for parameter in marked(parameters) if parameter not in _summed_in_steps])


class StepGradients:
    """The gradients of a step of the marked parameters of ``module``."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        mark_again(module)
        self._earlier: list[tuple[torch.Tensor, torch.Tensor | None, HeldHooks | None]] = []

    def set_aside(self) -> None:
        """Take earlier gradients out of ``.grad``, and the hooks away, before the step's first backward."""
        if parallel_state.get_tensor_model_parallel_size() == 1:
            return
        for parameter in marked(self._module.parameters()):
            hooks = HeldHooks(parameter) if count_hooks(parameter) else None
            self._earlier.append((parameter, parameter.grad, hooks))
            parameter.grad = None
            _summed_in_steps[parameter] = True

    def put_back(self) -> None:
        """Undo ``set_aside``, in a step that has failed."""
        for parameter, earlier, hooks in self._earlier:
            if hooks is not None:
                hooks.put_back()
            parameter.grad = earlier
        self._earlier = []

    def add_up(self, microbatches: Sequence[int]) -> None:
        """Sum the step's gradients, and add them to earlier ones; collective over the tensor group.

        ``microbatches`` has the microbatch of each action of the step.
        """
        sum_gradients([parameter for parameter, _, hooks in self._earlier if hooks is None])
        for parameter, earlier, hooks in self._earlier:
            if hooks is not None:
                hooks.run(microbatches, earlier, partial(_summed, parameter))
            elif earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._earlier = []


def marked(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The trained ``parameters`` that are marked as having the gradient of a part of the sequence."""
    return [parameter for parameter in parameters if parameter.requires_grad and is_sequence_parallel(parameter)]


def sum_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Replace each ``.grad`` by its sum over the tensor group: one message for each dtype and device.

    A gradient that is ``None`` on some ranks counts as zeros there. One that is ``None`` on all ranks stays ``None``.
    """
    if parallel_state.get_tensor_model_parallel_size() == 1:
        return
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        alike.setdefault((gradient_dtype(parameter), parameter.device), []).append(parameter)
    with torch.no_grad():
        for group in alike.values():
            _sum_alike(group)


def _summed(parameter: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of a microbatch's gradients over the tensor group."""
    kept, parameter.grad = parameter.grad, own
    sum_gradients([parameter])
    total, parameter.grad = parameter.grad, kept
    return total


def _sum_alike(parameters: list[torch.Tensor]) -> None:
    present = local_rows(parameters[0]).new_tensor([parameter.grad is not None for parameter in parameters])
    gradients = [local_rows(zero_gradient(p) if p.grad is None else p.grad) for p in parameters]
    total = all_reduce(torch.cat([present, *(gradient.reshape(-1) for gradient in gradients)]))
    anywhere, *parts = total.split([len(parameters), *(gradient.numel() for gradient in gradients)])
    missing = [False] * len(parameters) if all(p.grad is not None for p in parameters) else (anywhere == 0).tolist()
    for parameter, gradient, part, is_missing in zip(parameters, gradients, parts, missing, strict=True):
        if not is_missing:
            parameter.grad = with_rows(parameter, gradient.copy_(part.view_as(gradient)))
