"""NxDOptimizer: an optimizer whose step averages and clips the gradients, as the trainer wraps it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nxdpp.doors.nxd.config import check_sizes
from nxdpp.doors.nxd.neuron_zero1 import NeuronZero1Optimizer
from nxdpp.gradients.average import average_gradients
from nxdpp.gradients.gradient_norm import clip_grad_norm
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board
from nxdpp.tensor.sequence_parallel import allreduce_sequence_parallel_gradients
from nxdpp.tensor.tensor_copies import copies_among


def initialize_parallel_optimizer(
    nxd_config: dict[str, Any], optimizer_class: type[Optimizer], parameters: Iterable[Any], **defaults: Any
) -> "NxDOptimizer":
    """Make an optimizer whose ``step`` does the rest of a training step: average, clip, update; not collective.

    Args:
        nxd_config: of ``neuronx_distributed_config``.
        optimizer_class: a class such as ``torch.optim.AdamW``.
        parameters: of this rank, or groups of them, after ``initialize_parallel_model``.
        defaults: options of the class.

    Raises:
        ValueError: for ``use_fp32_grad_acc`` with half parameters before torch 2.10, and as the class does.
        RuntimeError: for a configuration with sizes other than the job's.
    """
    check_sizes(nxd_config)
    given = list(parameters)
    precision, options = nxd_config["mixed_precision_config"], nxd_config["optimizer_config"]
    dtypes = {parameter.dtype for parameter in _parameters(given) if parameter.requires_grad}
    halves = [dtype for dtype in dtypes if dtype.itemsize < torch.float32.itemsize]
    if not options["zero_one_enabled"]:
        return NxDOptimizer(optimizer_class(given, **defaults), nxd_config)
    if halves and not precision["use_master_weights"] and len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"use_master_weights=False needs parameters of one dtype, and these have {names}.")
    dtype = halves[0] if halves and not precision["use_master_weights"] else None
    sharded = NeuronZero1Optimizer(
        given,
        optimizer_class,
        optimizer_dtype=dtype,
        grad_clipping=options["grad_clipping"],
        max_norm=options["max_grad_norm"] if options["grad_clipping"] else None,
        use_grad_acc_hook=precision["use_fp32_grad_acc"],
        higher_cc_precision=precision["use_fp32_grad_acc"],
        **defaults,
    )
    return NxDOptimizer(sharded, nxd_config)


class NxDOptimizer(Optimizer):
    """The optimizer of ``initialize_parallel_optimizer``: ``optimizer`` with its own ``step``.

    Everything else comes from ``optimizer``: groups, state, ``zero_grad``, ``state_dict``. torch's learning-rate
    schedulers take it.

    Args:
        optimizer: a ``NeuronZero1Optimizer``, or one that is not sharded.
        nxd_config: of ``neuronx_distributed_config``.
    """

    # A scaler unscales the gradients itself: a fused optimizer would look for the scale on its own object.
    _step_supports_amp_scaling = False

    def __init__(self, optimizer: Optimizer, nxd_config: Mapping[str, Any]) -> None:
        # The base class is only for isinstance: groups and state are in the optimizer.
        self.optimizer = optimizer
        self.nxd_config = nxd_config
        self._grad_norm: torch.Tensor | None = None
        self._steps = 0

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of all groups."""
        return list(_parameters(self.param_groups))

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Norm of the whole model's gradients before they were clipped in the last step; ``None`` without clipping."""
        if self._is_sharded:
            return getattr(self.optimizer, "grad_norm", None)
        return self._grad_norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients of the replicas, clip them, and step; collective over all ranks.

        In a pipeline ``run_train`` has averaged them. With ZeRO-1 the sharded optimizer averages and clips. Gradients
        of sequence-parallel parameters are summed, if the configuration says so. Returns what ``closure`` returns.
        Raises ``RuntimeError`` if replicas are in different steps.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = self.params
        self._steps += 1
        if self.nxd_config["sequence_parallel"]:
            allreduce_sequence_parallel_gradients(parameters)
        if self.nxd_config["pipeline_parallel_size"] == 1:
            self._verify_copies(parameters)
        if not self._is_sharded:
            if self.nxd_config["pipeline_parallel_size"] == 1:
                self._average(parameters)
            options = self.nxd_config["optimizer_config"]
            if options["grad_clipping"]:
                self._grad_norm = clip_grad_norm(parameters, options["max_grad_norm"])
        self.optimizer.step()
        return loss

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's state."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, on all replicas alike."""
        self.optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the optimizer."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"NxDOptimizer({self.optimizer!r})"

    def _patch_step_function(self) -> None:
        """Leave the hooks of a step to the optimizer, which would otherwise run twice after a copy."""

    @property
    def _is_sharded(self) -> bool:
        return isinstance(self.optimizer, NeuronZero1Optimizer)

    def _verify_copies(self, parameters: list[nn.Parameter]) -> None:
        """Compare the gradients that earlier steps had on the tensor ranks; ``run_train`` does it in a pipeline."""
        if parallel_state.get_tensor_model_parallel_size() > 1:
            with board.call("NxDOptimizer.step"):
                for copies in copies_among(parameters):
                    copies.verify(torch.initial_seed())

    def _average(self, parameters: list[nn.Parameter]) -> None:
        number = self._steps

        def check(largest: list[int]) -> None:
            last, first = largest[0], -largest[1]
            if last != first:
                raise RuntimeError(
                    f"a data-parallel replica is in step {first} of its optimizer, and another in step {last}: this "
                    f"rank is in step {number}. Make each call of step() on every rank."
                )

        group, control = parallel_state.get_replica_group(), parallel_state.get_replica_control_group()
        with board.call("NxDOptimizer.step"), failure_watch.reported():
            average_gradients(parameters, group, control, [number, -number], check)


def _parameters(groups: Iterable[Any]) -> Iterable[nn.Parameter]:
    """The parameters in a list of parameters, of groups, or of parameters with names."""
    for each in groups:
        if isinstance(each, Mapping):
            of_group = each["params"]
            yield from _parameters([of_group] if isinstance(of_group, torch.Tensor) else of_group)
        else:
            yield each[1] if isinstance(each, tuple) else each
