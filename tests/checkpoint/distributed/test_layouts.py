"""What any layout of ranks has saved, any other loads, to the bit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.distributed.layouts import Layout, copy_through, tensors_in, train_and_save
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import VOCABULARY, make

Make = Callable[[], nn.Module]


def _batches(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randint(0, VOCABULARY, (8, 12), generator=generator) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


def _llama() -> nn.Module:
    model: nn.Module = make("llama", num_hidden_layers=4)
    return model


def _tied() -> nn.Module:
    model: nn.Module = make("llama", num_hidden_layers=4, tie_word_embeddings=True)
    return model


INTERLEAVED = {"virtual_pipeline_size": 2, "schedule": "interleaved"}
OF_TWO = (Layout(2), Layout(1, 2), Layout(1, 1, True), Layout(2, 1, False, {"pipeline_cuts": ["model.layers.0"]}))
OF_FOUR = (
    Layout(2, 2),
    Layout(2, 1, True),
    Layout(1, 2, True),
    Layout(4),
    Layout(2, 1, False, INTERLEAVED),
    Layout(1, 1, True),
    Layout(2, 2),
)


def _train(rank: int, make_model: Make, batches: list[dict[str, Any]], layout: Layout, path: Path) -> None:
    train_and_save(make_model, batches, layout, path)


def _copies(rank: int, make_model: Make, layouts: Sequence[Layout], path: Path, source: str) -> None:
    for layout in layouts:
        copy_through(make_model, layout, path, source)
        source = str(layout)


@pytest.mark.parametrize("make_model", [_llama, _tied])
def test_every_layout_loads_what_another_has_saved(make_model: Make, tmp_path: Path) -> None:
    one = Layout()
    run_ranks(1, _train, make_model, _batches(2), one, tmp_path)
    run_ranks(2, _copies, make_model, OF_TWO, tmp_path, str(one))
    run_ranks(4, _copies, make_model, OF_FOUR, tmp_path, str(OF_TWO[-1]))
    expected_document, expected = tensors_in(tmp_path / str(one))
    for layout in (*OF_TWO, *OF_FOUR):
        document, tensors = tensors_in(tmp_path / str(layout))
        assert set(tensors) == set(expected), layout
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[name]), (layout, name)
        for key in ("ties", "optimizer", "scheduler", "user_content"):
            assert document.content[key] == expected_document.content[key], (layout, key)
