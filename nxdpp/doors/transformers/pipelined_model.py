"""The model of ``PipelineTrainer``: an ``NxDPPModel`` that takes the batches of an optimizer step as microbatches."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nxdpp.pipeline.model import NxDPPModel


class TrainerModel(NxDPPModel):
    """An ``NxDPPModel`` with steps of any number of microbatches, which may differ in sizes."""

    def run_microbatches(
        self,
        microbatches: Sequence[Mapping[str, Any]],
        are_summed: bool = False,
        weights: Sequence[float] | None = None,
    ) -> list[torch.Tensor]:
        """Run forward and backward of ``microbatches``; collective over all ranks.

        The loss is their mean, or with ``num_items_in_batch`` the mean over these items, or the sum if ``are_summed``.
        Each loss is first multiplied by its weight, if there are ``weights``.
        Returns the share of each in the loss of the step, on all ranks of its pipeline: the loss is the sum of these.
        Raises as ``Steps.train_microbatches`` does.
        """
        factor = len(microbatches) if are_summed else 1
        scales = [weight * factor for weight in weights or [1.0] * len(microbatches)]
        if set(scales) == {1.0}:
            losses = self.steps.train_microbatches(microbatches)
        else:
            losses = self.steps.train_microbatches(microbatches, lambda number, loss: loss * scales[number])
        return [loss * scale / len(losses) for loss, scale in zip(losses, scales, strict=True)]
