"""``train_step`` and ``infer_step`` of an end-to-end module, over a pipeline or in a loop."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nxdpp import Pipeline
from nxdpp.nnscaler.end2end import loss_of
from nxdpp.nnscaler.nested_values import map_values

ScaleFn = Callable[[torch.Tensor], torch.Tensor]


class Steps:
    """Steps of one end-to-end module.

    Args:
        part: the module, called where there is no pipeline.
        pipeline: the pipeline of a unit, or ``None``.
        sample_name: first argument of forward.
        microbatches: number of samples of a step over the pipeline.
    """

    def __init__(self, part: nn.Module, pipeline: Pipeline | None, sample_name: str, microbatches: int) -> None:
        self._part = part
        self._pipeline = pipeline
        self._sample_name = sample_name
        self._microbatches = microbatches

    def check(self, samples: Sequence[Any], is_dummy_batch: Sequence[bool] | None = None) -> None:
        """Raise ``TypeError`` or ``ValueError`` for samples that are no list, and for other numbers of them."""
        if isinstance(samples, str | bytes) or not isinstance(samples, Sequence):
            raise TypeError(f"samples must be a list with one value for each sample, not a {type(samples).__name__}")
        if not samples:
            raise ValueError("samples is empty: give at least one sample")
        if self._pipeline is not None and len(samples) != self._microbatches:
            raise ValueError(
                f"{len(samples)} samples were given, and a step of this pipeline takes {self._microbatches} "
                f"(pipeline_nmicros)"
            )
        if is_dummy_batch is not None and len(is_dummy_batch) != len(samples):
            raise ValueError(
                f"is_dummy_batch has {len(is_dummy_batch)} values for {len(samples)} samples: give one for each"
            )

    def train(
        self, samples: Sequence[Any], is_dummy_batch: Sequence[bool] | None, scale_fn: ScaleFn | None
    ) -> list[Any]:
        """Add the gradients of all samples to ``.grad``; return their detached outputs."""

        def transform(number: int, loss: torch.Tensor) -> torch.Tensor:
            if is_dummy_batch is not None and is_dummy_batch[number]:
                # Zeros as gradients, and not None: each optimizer's state goes on as in the other units.
                loss = loss * 0.0
            return loss if scale_fn is None else scale_fn(loss)

        if self._pipeline is not None:
            return self._pipeline.train_samples(self._named(samples), transform, average=False)
        outputs = []
        for number, sample in enumerate(samples):
            output = self._part(sample)
            transform(number, loss_of(output)).backward()
            outputs.append(map_values(_detached, output))
        return outputs

    def infer(self, samples: Sequence[Any]) -> list[Any]:
        """Return the outputs of all samples, computed without gradients."""
        if self._pipeline is not None:
            return self._pipeline.eval_samples(self._named(samples))
        with torch.no_grad():
            return [self._part(sample) for sample in samples]

    def _named(self, samples: Sequence[Any]) -> list[dict[str, Any]]:
        return [{self._sample_name: sample} for sample in samples]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
