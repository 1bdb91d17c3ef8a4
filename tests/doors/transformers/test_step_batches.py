"""The batches of an optimizer step run once, and images are not split."""

import pytest
import torch

from nxdpp.doors.transformers.step_batches import StepBatches, split_rows

Batch = dict[str, torch.Tensor]


def batches(count: int) -> list[Batch]:
    return [{"ids": torch.full((2,), number)} for number in range(count)]


def run(given: list[Batch]) -> list[torch.Tensor]:
    return [batch["ids"].sum() for batch in given]


def test_a_batch_that_runs_twice_is_refused() -> None:
    step, given = StepBatches(), batches(2)
    step.begin(given)
    step.loss_of(given[0], run)
    with pytest.raises(ValueError, match="or run them twice"):
        step.loss_of(given[0], run)


def test_images_of_a_split_batch_are_refused() -> None:
    batch = {"input_ids": torch.ones(2, 7), "pixel_values": torch.ones(1, 3)}
    with pytest.raises(ValueError, match=r"num_microbatches splits .*'pixel_values': 1\}\. Use num_microbatches="):
        split_rows(batch, 2, None)
