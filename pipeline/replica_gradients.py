"""Gradients averaged over the data-parallel replicas, whose parameters are verified before."""

from torch import nn

from nxdpp.parallel_layers import failure_watch, parallel_state
from nxdpp.parallel_layers.gradient_average import average_gradients
from nxdpp.pipeline.agreement.fingerprint import parameter_lines
from nxdpp.pipeline.agreement.replicas import check_replica_values


class ReplicaGradients:
    """The gradients of this rank's parameters.

    Args:
        module: the local modules.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._verified = False

    def verify(self, origin: str | None, seed: int) -> None:
        """Verify once that the replicas have the same parameters and values; collective over them.

        Args:
            origin: a line about the origin of the values, the same on each replica.
            seed: ``torch.initial_seed()`` when this rank wrapped the model, for the message.

        Raises:
            RuntimeError: for other names, shapes or dtypes than the first replica has, or other values in a sample.
        """
        if self._verified:
            return
        parameters = list(self._module.named_parameters())
        group = parallel_state.get_data_parallel_group()
        with failure_watch.reported():
            check_replica_values(parameters, origin, group, seed, parameter_lines(parameters))
        self._verified = True

    def average(self) -> None:
        """Average ``.grad`` over the replicas; collective over them."""
        group, control = parallel_state.get_data_parallel_group(), parallel_state.get_data_parallel_control_group()
        average_gradients(self._module.parameters(), group, control)

    def verify_again(self) -> None:
        """Verify the parameters again before the next step."""
        self._verified = False
