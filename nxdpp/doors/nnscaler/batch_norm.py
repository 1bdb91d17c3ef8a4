"""Batch norms over the samples of all units.

::

    unit 0   x ─ sums ─┐                     ┌─▶ mean, variance ─▶ y
    unit 1   x ─ sums ─┴─ sum over the units ┴─▶ mean, variance ─▶ y
"""

from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from nxdpp.counted import counted
from nxdpp.ranks import parallel_state
from nxdpp.ranks.group_values import extremes
from nxdpp.tensor.mappings import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region


class UnitsBatchNorm2d(nn.BatchNorm2d):
    """``BatchNorm2d`` whose statistics in training are of the samples of all units.

    ``over_units`` gives modules this class. A forward and a backward in training are collective over the units.
    """

    # A pipeline knows torch's batch norms by it: the statistics belong to one stage.
    __module__ = nn.BatchNorm2d.__module__

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the class by its own place."""
        return _new, (), vars(self)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise ``input`` (N, C, H, W), with the statistics of all units in training."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        group = parallel_state.get_data_parallel_group()
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        count = values.new_full((1,), input.numel() / input.shape[1])
        sums = _sum(torch.cat([values.sum((0, 2, 3)), count]), group)
        count = sums[-1].detach()
        mean = sums[:-1] / count
        variance = _sum((values - _wide(mean)).square().sum((0, 2, 3)), group) / count
        self._track(mean.detach(), variance.detach() * count / (count - 1))
        scale = (variance + self.eps).rsqrt() * (1 if self.weight is None else self.weight)
        shift = (0 if self.bias is None else self.bias) - mean * scale
        return (values * _wide(scale) + _wide(shift)).to(input.dtype)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)


def over_units(module: nn.Module, units: int) -> list[nn.Module]:
    """Let each ``BatchNorm2d`` of ``module`` count the samples of all ``units``, and return them; not collective."""
    norms = [part for part in module.modules() if units > 1 and type(part) is nn.BatchNorm2d]
    for norm in norms:
        norm.__class__ = UnitsBatchNorm2d
    return list(norms)


def refuse_other_numbers(norms: list[nn.Module], samples: int) -> None:
    """Raise ``RuntimeError`` on all units for different numbers of ``samples``, where ``norms`` count them.

    Collective over the units if one of ``norms`` is in training: each sample is a message.
    """
    if any(norm.training for norm in norms):
        (fewest,), (most,) = extremes([samples], parallel_state.get_replica_control_group())
        if fewest != most:
            raise RuntimeError(
                f"a unit was given {counted(fewest, 'sample')} and another {most}, and a BatchNorm2d counts each "
                "sample of all units together: give all units equally many, or set the batch norms to eval()"
            )


def _new() -> nn.Module:
    return UnitsBatchNorm2d.__new__(UnitsBatchNorm2d)


def _sum(values: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Sum over ``group``. Each unit's gradient of the result is summed too: all units use it."""
    return copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(values, group), group)


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, 1, 1)
