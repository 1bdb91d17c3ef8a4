"""Index errors inside a step name the input."""

import pytest
import torch

from nxdpp import NxDPPModel
from tests.support.models import VOCABULARY, make, padded_batch

pytestmark = pytest.mark.usefixtures("one_rank")


def notes_for(name: str, value: int) -> list[str]:
    batch = padded_batch(4)
    batch[name] = batch[name].clone()
    batch[name][3, 2] = value
    wrapped = NxDPPModel(make("llama", layers=2), num_microbatches=2)
    with pytest.raises(IndexError, match="out of") as caught:
        wrapped.run_train(**batch)
    ranges = next(note for note in caught.value.__notes__ if note.startswith("integer inputs of this microbatch"))
    for given, tensor in batch.items():
        if not tensor.dtype.is_floating_point and tensor.dtype is not torch.bool:
            part = tensor[2:]
            assert f"{given} from {part.min()} to {part.max()}" in ranges
    return caught.value.__notes__


def test_an_id_beyond_the_vocabulary() -> None:
    notes = notes_for("input_ids", VOCABULARY)
    assert "in the pipeline: stage 0, forward of microbatch 1 (action 0F1)" in notes
    assert f"input_ids is an index of model.embed_tokens, which has rows 0 to {VOCABULARY - 1}" in notes


def test_a_label_beyond_the_vocabulary() -> None:
    notes = notes_for("labels", 70)
    assert not any("is an index of" in note for note in notes)
