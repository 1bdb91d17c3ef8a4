"""Gradients averaged over the data-parallel replicas, whose parameters are verified before."""

from torch import nn

from nxdpp.parallel_layers import failure_watch, parallel_state
from nxdpp.parallel_layers.gradient_average import average_gradients
from nxdpp.pipeline.agreement.fingerprint import parameter_lines
from nxdpp.pipeline.agreement.replicas import check_replica_values
from nxdpp.pipeline.replica_exchange import ReplicaExchanges


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

    def verify(self, origin: str | None, seed: int) -> None:
        """Verify once that the replicas have the same parameters and values; collective over them.

        Args:
            origin: a line about the origin of the values, the same on each replica.
            seed: ``torch.initial_seed()`` when this rank wrapped the model, for the message.

        Raises:
            RuntimeError: for other names, shapes or dtypes than the first replica has, or other values in a sample.
        """
        if not self._verified:
            self._compare(origin, seed)
            self._verified = True

    def average(self, origin: str | None, seed: int, number: int) -> None:
        """Average ``.grad`` over the replicas; collective over them.

        Args:
            origin, seed: as for ``verify``, after ``verify_again`` on any replica.
            number: of this rank's training step.

        Raises:
            RuntimeError: on all of them, where replicas are in different steps, and as ``verify`` does.
        """

        def check(largest: list[int]) -> None:
            last, first, changed = largest[0], -largest[1], largest[2]
            if last != first:
                raise RuntimeError(
                    f"a data-parallel replica is in training step {first}, and another in training step {last}: this "
                    f"rank is in step {number}. Their gradients belong to different batches. Make each call of "
                    f"run_train on every rank. If a program catches the error of a step, it must leave the step out on "
                    f"all ranks."
                )
            if changed:
                self._compare(origin, seed)
                self._changed = False

        group, control = parallel_state.get_data_parallel_group(), parallel_state.get_data_parallel_control_group()
        parameters = dict(self._module.named_parameters())
        # Parameters are paired by their order among those that are trained.
        trained = [f"trained {name}" for name, parameter in parameters.items() if parameter.requires_grad]
        self._exchanges.begin("average of gradients", trained)
        average_gradients(parameters.values(), group, control, [number, -number, self._changed], check)

    def verify_again(self) -> None:
        """Verify the parameters again before the next average, on all replicas."""
        self._changed = True

    def _compare(self, origin: str | None, seed: int) -> None:
        self._exchanges.begin("comparison of parameters")
        parameters = list(self._module.named_parameters())
        group = parallel_state.get_data_parallel_group()
        with failure_watch.reported():
            check_replica_values(parameters, origin, group, seed, parameter_lines(parameters))
