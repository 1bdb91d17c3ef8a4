"""Gradients averaged over the data-parallel replicas, whose parameters are verified before."""

from torch import nn

from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.gradient_average import average_gradients
from nxdpp.pipeline.agreement.fingerprint import parameter_lines
from nxdpp.pipeline.agreement.replicas import check_replicas


class ReplicaGradients:
    """The gradients of this rank's parameters.

    Args:
        module: the local modules.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._verified = False

    def average(self, origin: str | None) -> None:
        """Average ``.grad`` over the replicas; collective over them.

        ``origin`` is a line about the origin of the values, the same on each replica. Raises ``RuntimeError`` for
        replicas with other parameters than the first.
        """
        group = parallel_state.get_data_parallel_group()
        if not self._verified:
            lines = parameter_lines(self._module.named_parameters())
            check_replicas([*([] if origin is None else [origin]), *lines], group)
            self._verified = True
        average_gradients(self._module.parameters(), group)

    def verify_again(self) -> None:
        """Verify the parameters before the next average."""
        self._verified = False
