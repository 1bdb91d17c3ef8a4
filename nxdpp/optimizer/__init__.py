"""Optimizers whose state is sharded over the data-parallel replicas, or kept in float32."""

from nxdpp.doors.nxd.neuron_zero1 import NeuronZero1Optimizer
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer

__all__ = ["NeuronZero1Optimizer", "Zero1Optimizer"]


def __dir__() -> list[str]:
    return __all__
