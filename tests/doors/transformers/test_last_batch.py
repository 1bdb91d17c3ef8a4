"""Rows that fill a last batch: cut off, or without labels beside images."""

import pytest
import torch

from nxdpp.doors.transformers.last_batch import LastBatch, weights_of
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


def test_images_beside_labels_of_rows_are_refused() -> None:
    for labels in (torch.tensor([3, 1, 2, 3]), torch.ones(4)):
        batch = {"input_ids": TOKENS, "labels": labels, "pixel_values": torch.ones(2, 3, 8, 8)}
        with pytest.raises(
            ValueError, match=r"has 3 rows, .* \{'input_ids': 4, 'labels': 4, 'pixel_values': 2\}.*drop_last"
        ):
            LastBatch.of(batch, 3)
        assert LastBatch.of(batch, 3, has_loss=False) is LastBatch.of(batch, 0) is LastBatch.of(batch, -1) is None


def test_a_mean_weighs_as_rows_or_as_a_batch() -> None:
    rows = [None, LastBatch(rows=1, size=4, total=1)]
    assert weights_of([{"labels": torch.ones(4).long()}] * 2, rows) == [1.0, 2.0]
    # Three batches of one process: two full ones, and one of a row.
    assert weights_of([{"labels": TOKENS}] * 2, rows) == [4 / 3, 4 / 3]
    assert weights_of([{"labels": TOKENS}] * 2, [None, LastBatch(rows=0, size=4, total=1)]) == [4 / 3, 0.0]
    assert weights_of([{"labels": TOKENS}] * 2, [None, LastBatch(rows=3, size=4, total=7)]) == [1.0, 1.0]
