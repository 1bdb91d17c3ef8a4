"""The model of ``PipelineTrainer``: an ``NxDPPModel`` that takes the batches of an optimizer step as microbatches."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nxdpp.pipeline.model import NxDPPModel
from nxdpp.pipeline.pipeline import Pipeline


class TrainerModel(NxDPPModel):
    """An ``NxDPPModel`` with steps of any number of microbatches, which may differ in sizes."""

    def run_microbatches(
        self, microbatches: Sequence[Mapping[str, Any]], are_summed: bool = False
    ) -> list[torch.Tensor]:
        """Run forward and backward of ``microbatches``; collective over all ranks.

        The loss is their mean, or with ``num_items_in_batch`` the mean over these items, or the sum if ``are_summed``.
        Returns the share of each in the loss of the step, on all ranks of its pipeline: the loss is the sum of these.
        Raises as ``Pipeline.train_microbatches`` does.
        """
        if not are_summed:
            losses = self._pipeline.train_microbatches(microbatches)
            return [loss / len(losses) for loss in losses]
        return self._pipeline.train_microbatches(microbatches, lambda _, loss: loss * len(microbatches))

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline, whose microbatches may differ in sizes."""
        return self._pipeline
