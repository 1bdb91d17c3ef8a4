"""The model of ``PipelineTrainer``: an ``NxDPPModel`` that takes the batches of an optimizer step as microbatches."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nxdpp.pipeline.model import NxDPPModel


class PipelinedModel(NxDPPModel):
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

    def takes_number_of_items(self, microbatch: Mapping[str, Any]) -> bool:
        """Return whether the loss depends on the ``num_items_in_batch`` of ``microbatch``; not collective."""
        return self._pipeline.takes_number_of_items(microbatch)

    def eval_losses(self, microbatches: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
        """Run the forward of ``microbatches``; return the loss of each on all ranks of its pipeline.

        Collective over the pipeline. Raises as ``Pipeline.eval_microbatches`` does.
        """
        return self._pipeline.eval_microbatches(microbatches)

    def eval_outputs(self, microbatches: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Run the forward as ``eval_losses``, and return the model's output for each microbatch."""
        return self._pipeline.eval_microbatches(microbatches, outputs=True)

    def check_count(self, microbatches: int) -> None:
        """Raise ``ValueError`` for a number of microbatches that the schedule cannot train; not collective."""
        self._pipeline.schedule.of(microbatches, train=True)
