"""Sequences of the text: a seed determines the batches."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from windows import RandomWindows, held_out_batches


def test_random_windows_follow_the_seed() -> None:
    text = bytes(range(251)) * 4

    def drawn(seed: int) -> torch.Tensor:
        windows = RandomWindows(text, 12, 16, seed)
        return torch.stack([windows[index] for index in range(len(windows))])

    assert drawn(seed=1).shape == (12, 16)
    assert drawn(seed=1).dtype == torch.int64
    assert torch.equal(drawn(seed=1), drawn(seed=1))
    assert not torch.equal(drawn(seed=1), drawn(seed=2))
    assert len({int(start) for start in drawn(seed=1)[:, 0]}) > 6


@settings(deadline=None)
@given(length=st.integers(2, 60), seq_length=st.integers(2, 60), count=st.integers(1, 4))
def test_batches_are_pieces_of_the_text(length: int, seq_length: int, count: int) -> None:
    seq_length = min(length, seq_length)
    text = bytes(range(length))

    windows = RandomWindows(text, 3 * count, seq_length, seed=0)
    batches = [torch.stack([windows[index] for index in range(3)])]
    held_out = list(held_out_batches(text, 3, seq_length, count))

    assert len(held_out) == count
    for batch in batches + held_out:
        assert batch.shape == (3, seq_length)
        assert torch.equal(batch - batch[:, :1], torch.arange(seq_length).expand(3, -1))
        assert batch.max() < length


def test_held_out_batches_reach_from_the_first_byte_to_the_last() -> None:
    text = bytes(range(200))
    batches = torch.cat(list(held_out_batches(text, 2, 10, 5)))

    assert batches[0, 0] == 0
    assert batches[-1, -1] == 199
    assert len(set(batches[:, 0].tolist())) == 10
