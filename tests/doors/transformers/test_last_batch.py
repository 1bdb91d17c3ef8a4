"""Rows that fill a last batch have no labels of their own beside images."""

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


def test_images_beside_labels_of_rows_are_refused() -> None:
    for labels in (torch.tensor([3, 1, 2, 3]), torch.ones(4)):
        batch = {"input_ids": TOKENS, "labels": labels, "pixel_values": torch.ones(2, 3, 8, 8)}
        with pytest.raises(
            ValueError, match=r"has 3 rows, .* \{'input_ids': 4, 'labels': 4, 'pixel_values': 2\}.*drop_last"
        ):
            LastBatch.of(batch, 3)
        assert LastBatch.of(batch, 3, has_loss=False) is LastBatch.of(batch, 0) is LastBatch.of(batch, -1) is None
