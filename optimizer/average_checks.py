"""Check, at the first optimizer step, that the optimizer averages gradients over replicas (``use_zero1_optimizer``)."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.pipeline.agreement.replicas import check_replicas
from nxdpp.pipeline.agreement.same_values import sample


class FirstStepCheck:
    """Compares a sample of the parameters over the replicas, after the first step of each optimizer that changes some.

    The first steps of a warm-up may have a learning rate of 0, which shows nothing. The parameters of an optimizer are
    compared until one of them changes. Those steps are collective over ``group``. The hook on optimizers' steps is
    removed after the last optimizer.

    Args:
        parameters: those of this rank, by name, before the step.
        group: the data-parallel ranks that have the same ones.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        trained = {name: each for name, each in parameters.items() if each.requires_grad}
        # The hook may outlive the model: an id alone could then be that of another model's parameter.
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary({each: name for name, each in trained.items()})
        self._before = {name: sample(parameter) for name, parameter in trained.items()}
        self._group = group
        self._hook: RemovableHandle = register_optimizer_step_post_hook(self._check)

    def _check(self, optimizer: Optimizer, *_: Any) -> None:
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
        if not len(self._names):
            self._hook.remove()
