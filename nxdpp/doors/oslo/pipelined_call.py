"""Call of a pipelined model: the whole step in its forward, the gradients of this rank's parameters in its backward.

::

    model(**batch)     Pipeline.train_step on the shadow    loss, equal on all ranks of the pipeline
    loss.backward()    gradients of the shadow ─▶ AccumulateGrad of the user's parameters ─▶ DistributedDataParallel
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils.generic import ModelOutput

from nxdpp.doors.oslo.shadow import Shadow
from nxdpp.ground.torch_names import pytree
from nxdpp.pipeline.microbatches.rows import check_batch, split_inputs
from nxdpp.pipeline.pipeline import Pipeline
from nxdpp.ranks import parallel_state
from nxdpp.ranks.group_values import broadcast_value


@dataclass
class TrainingOutput(ModelOutput):
    """Output of a pipelined model with gradients; other outputs stay on the rank of the last stage.

    Attributes:
        loss: mean of the microbatches' losses, a scalar.
    """

    loss: torch.Tensor | None = None


class PipelinedCall:
    """Calls of one pipelined model; each is collective over its pipeline."""

    def __init__(self, shadow: Shadow, pipeline: Pipeline) -> None:
        self._shadow = shadow
        self._pipeline = pipeline

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        """Return the loss if gradients are on, and otherwise the whole output, on all ranks."""
        self._shadow.follow(self._pipeline.local_module)
        if torch.is_grad_enabled():
            return TrainingOutput(loss=self._train(inputs))
        samples = _split(inputs, self._pipeline.config.num_microbatches)
        return _join(self._pipeline.eval_samples(samples))

    def generate(self, inputs: Any, arguments: Mapping[str, Any]) -> Any:
        """Return the tokens that the model generates, on all ranks."""
        self._shadow.follow(self._pipeline.local_module)
        return self._pipeline.generate(inputs, **arguments)

    def _train(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        kind = self._pipeline.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
            raise RuntimeError(
                f"a pipelined model runs its backward inside of the call, before a scaler scales the loss, and small "
                f"gradients in float16 would become zero: use torch.autocast({kind!r}, torch.bfloat16)"
            )
        losses = self._pipeline.train_step(inputs)
        loss = self._on_all_ranks(torch.stack(losses).mean() if losses else None)
        parameters, gradients = [], []
        for pair in self._shadow.pairs:
            gradient, pair.shadow.grad = pair.shadow.grad, None
            if gradient is not None:
                parameters.append(pair.parameter)
                gradients.append(gradient)
        # The loss of a rank whose parameters are all frozen needs a backward too.
        anchor = torch.zeros((), requires_grad=True)
        result: torch.Tensor = _GivenGradients.apply(loss, gradients, anchor, *parameters)  # type: ignore[no-untyped-call]
        return result

    def _on_all_ranks(self, loss: torch.Tensor | None) -> torch.Tensor:
        """The ``loss`` of the rank of the last stage, which is the last of the pipeline."""
        group = parallel_state.get_pipeline_control_group()
        own = None if loss is None else loss.cpu()
        value = broadcast_value(own, group, dist.get_world_size(group) - 1)
        assert value is not None
        return value.to(self._pipeline.device) if loss is None else loss


class _GivenGradients(torch.autograd.Function):
    """The loss, whose gradients for the parameters are known. ``anchor`` gets none."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: torch.Tensor,
        gradients: list[torch.Tensor],
        anchor: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("a second backward of one call of a pipelined model: call the model again")
        # In place: there is no memory for a second copy.
        return None, None, None, *(gradient.mul_(outer[0]) for gradient in gradients)


def _split(inputs: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    """Split the tensors ``(B, ...)`` of ``inputs`` along dimension 0 into ``number`` samples of equal rows.

    Tensors of first dimension 1 next to larger ones, of no dimension, and values other than tensors go to each sample.

    Raises:
        ValueError: for rows that do not divide, and for tensors of different rows.
        TypeError: for tensors nested in values that are not tensors.
    """
    for name, value in inputs.items() if number > 1 else ():
        is_nested = not isinstance(value, torch.Tensor)
        if is_nested and any(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in pytree.tree_leaves(value)):
            raise TypeError(f"{name} holds tensors in a {type(value).__name__}: give tensors, or num_microbatches=1")
    check_batch(inputs, number)
    return split_inputs(inputs, number)


def _join(outputs: Sequence[Any]) -> Any:
    """Join the outputs of samples: losses to their mean, other tensors along dimension 0."""
    if len(outputs) == 1:
        return outputs[0]
    flat = [pytree.tree_flatten(output) for output in outputs]
    leaves = [_joined(values) for values in zip(*(each for each, _ in flat), strict=True)]
    return pytree.tree_unflatten(leaves, flat[0][1])


def _joined(values: Sequence[Any]) -> Any:
    if not isinstance(values[0], torch.Tensor):
        return values[0]
    return torch.cat(list(values)) if values[0].dim() else torch.stack(list(values)).mean()
