"""The batches of an optimizer step run once, unchanged and in order."""

import pytest
import torch

from nxdpp.doors.transformers.step_batches import StepBatches, split_rows

Batch = dict[str, torch.Tensor]


def batches(count: int) -> list[Batch]:
    return [{"ids": torch.full((2,), number)} for number in range(count)]


def run(given: list[Batch]) -> list[torch.Tensor]:
    return [batch["ids"].sum() for batch in given]


@pytest.mark.parametrize("place", [0, 1])
def test_a_batch_that_is_changed_in_place_is_refused(place: int) -> None:
    step, given = StepBatches(), batches(2)
    step.begin(given)
    if place:
        step.loss_of(given[0], run)
    given[place]["ids"] += 1
    with pytest.raises(ValueError, match=r"training_step was given another batch .* Change them in data_collator"):
        step.loss_of(given[place], run)


def test_a_batch_that_runs_twice_is_refused() -> None:
    step, given = StepBatches(), batches(2)
    step.begin(given)
    step.loss_of(given[0], run)
    with pytest.raises(ValueError, match="or run them twice"):
        step.loss_of(given[0], run)


def test_a_step_that_was_left_is_refused() -> None:
    step, given = StepBatches(), batches(3)
    step.begin(given)
    step.loss_of(given[0], run)
    with pytest.raises(ValueError, match=r"2 batches before .* Set control.should_epoch_stop or .* in on_step_end"):
        step.begin(batches(3))
    step.clear()
    step.begin(given)


@pytest.mark.parametrize(
    ("most_tokens", "sentence"),
    [
        (None, r"num_microbatches splits .*'pixel_values': 1\}\. Use num_microbatches=gradient_accumulation_steps"),
        (14, r"most_tokens=14 splits .*'pixel_values': 1\}\. Leave it out, and no batch is split"),
    ],
)
def test_images_of_a_split_batch_are_refused_by_the_argument_that_was_given(
    most_tokens: int | None, sentence: str
) -> None:
    batch = {"input_ids": torch.ones(2, 7), "pixel_values": torch.ones(1, 3)}
    with pytest.raises(ValueError, match=sentence):
        split_rows(batch, 2, most_tokens)
