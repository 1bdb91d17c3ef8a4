"""Times of XLA ranks: boxes are times of the device, compilations have boxes of their own."""

import json
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.devices.kinds import device_of
from tests.support.xla_ranks import run_xla_ranks

MICROBATCHES = 4
STEPS = 4


class Layer(nn.Module):
    """A layer whose computation takes milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.linear(x).tanh()
        return x


class Model(nn.Module):
    """Layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _train(rank: int, path: str) -> list[tuple[float, float]]:
    """Train; return busy share and compile seconds of each step."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, device="xla")
    torch.manual_seed(0)
    model = NxDPPModel(
        Model(),
        transformer_layer_cls=Layer,
        num_microbatches=MICROBATCHES,
        output_loss_value_spec=True,
        trace_file_path=path,
    )
    model.move_model_to_device()
    optimizer = torch.optim.SGD(list(model.local_parameters()), lr=0.1)
    found = []
    for _ in range(STEPS):
        model.run_train(x=torch.ones(MICROBATCHES * 256, 512))
        device_of(parallel_state.local_device()).synchronize()
        found.append((model.last_busy_share, model.last_compile_seconds))
        optimizer.step()
        optimizer.zero_grad()
    return found


class Box(NamedTuple):
    """An event of a timeline, in nanoseconds."""

    category: str
    start: int
    end: int


def _boxes(path: Path) -> dict[int, dict[int, list[Box]]]:
    """Return the events of each rank, by step."""
    found: dict[int, dict[int, list[Box]]] = {}
    for row in json.loads(path.read_text()):
        if row["ph"] == "X":
            box = Box(row["cat"], round(1000 * row["ts"]), round(1000 * (row["ts"] + row["dur"])))
            found.setdefault(row["args"]["step"], {}).setdefault(row["tid"], []).append(box)
    return found


def _of(events: list[Box], category: str) -> list[Box]:
    return [event for event in events if event.category == category]


def _seconds(events: list[Box]) -> float:
    return 1e-9 * sum(event.end - event.start for event in events)


def test_boxes_are_times_of_the_device_and_compilations_are_apart(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    ranks = run_xla_ranks(2, _train, str(path))
    steps = _boxes(path)
    assert sorted(steps) == list(range(STEPS))
    for step, events_of in steps.items():
        for rank, events in events_of.items():
            ((start, end),) = [(event.start, event.end) for event in _of(events, "step")]
            boxes, compilations = _of(events, "compute"), _of(events, "compile")
            assert len(boxes) == 2 * MICROBATCHES
            for before, after in pairwise(boxes):
                assert before.start <= before.end <= after.start <= after.end
            assert all(start <= event.start < event.end <= end for event in boxes + compilations)
            assert 0 < _seconds(boxes) <= 1e-9 * (end - start)
            busy, compiled = ranks[rank][step]
            # The device computes in boxes alone.
            assert _seconds(boxes) == pytest.approx(busy * 1e-9 * (end - start), rel=0.3)
            assert len(compilations) >= (2 if step == 0 else 0)
            assert _seconds(compilations) <= compiled + 1e-3
            if step >= 2:
                assert (compilations, compiled) == ([], 0.0)
    names = {row["name"] for row in json.loads(path.read_text()) if row.get("cat") == "compile"}
    assert names >= {"compile F s0 mb0", "compile B s1 mb0"}
