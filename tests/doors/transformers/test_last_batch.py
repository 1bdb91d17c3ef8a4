"""Rows that fill a last batch: cut off, or without labels beside images."""

import pytest
import torch

from nxdpp.doors.transformers.last_batch import LastBatch
from nxdpp.ranks import parallel_state

TOKENS = torch.arange(12).view(4, 3)


@pytest.fixture(autouse=True)
def replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas, of which this is the first, with 4 rows each; 3 of 8 are rows of their own."""
    monkeypatch.setattr(parallel_state, "get_data_parallel_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda: 0)


def test_rows_that_fill_are_cut_off() -> None:
    batch = {"input_ids": TOKENS, "labels": torch.tensor([3, 1, 2, 3])}
    last = LastBatch.of(batch, 3)
    assert last == LastBatch(rows=3, size=4, total=3)
    assert last is not None
    assert [len(value) for value in last.own(batch).values()] == [3, 3]


def test_beside_images_the_rows_that_fill_have_no_labels() -> None:
    batch = {"input_ids": TOKENS, "labels": TOKENS, "pixel_values": torch.ones(2, 3, 8, 8)}
    last = LastBatch.of(batch, 3)
    assert last is not None
    own = last.own(batch)
    assert torch.equal(own["labels"][:3], TOKENS[:3])
    assert own["labels"][3].eq(-100).all()
    assert own["pixel_values"] is batch["pixel_values"]
    assert torch.equal(batch["labels"], TOKENS)


def test_labels_of_rows_have_no_value_that_is_ignored() -> None:
    for labels in (torch.tensor([3, 1, 2, 3]), torch.ones(4)):
        assert LastBatch.of({"input_ids": TOKENS, "labels": labels, "pixel_values": torch.ones(2, 3, 8, 8)}, 3) is None
