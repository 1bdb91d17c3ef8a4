"""16 steps equal 8 steps, a stop, and 8 steps of new processes."""

from pathlib import Path

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint
from tests.checkpoint.distributed.layouts import Layout, Training, tensors_in
from tests.support import models, tensor_models
from tests.support.run_ranks import run_ranks

STEPS, STOP = 16, 8
MEAN_LOSS = {"broadcast_and_average_loss": True}
STAGES, ZERO1, TENSOR = Layout(2, 1, False, MEAN_LOSS), Layout(1, 1, True, MEAN_LOSS), Layout(1, 2, False, MEAN_LOSS)
WANDERING = ((STAGES, STOP), (ZERO1, 12), (TENSOR, STEPS))
"""Layouts that go on with one training, each up to a step."""


def _dropping() -> nn.Module:
    model: nn.Module = models.make("gpt2", layers=2, dropout=0.1)
    return model


def _llama() -> nn.Module:
    model: nn.Module = tensor_models.make("llama")
    return model


def _batch(step: int) -> dict[str, torch.Tensor]:
    """The batch of this replica."""
    ids = torch.randint(0, models.VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(step))
    own = ids.chunk(parallel_state.get_data_parallel_size())[parallel_state.get_data_parallel_rank()]
    return {"input_ids": own, "labels": own}


def _train(rank: int, path: Path, layout: Layout, source: str | None, name: str, last: int) -> list[float | None]:
    """Go on from the checkpoint ``source``, or from the start, up to step ``last``; save under ``name``."""
    parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline)
    training = Training(_llama if path.name == "wandering" else _dropping, layout)
    done = 0
    if source is None:
        torch.manual_seed(rank)
    else:
        torch.manual_seed(77)
        done = load_checkpoint(path, source, training.model, training.optimizer, training.scheduler)["step"]
    losses = []
    for step in range(done + 1, last + 1):
        losses.append(training.step(_batch(step)))
    save_checkpoint(path, name, training.model, training.optimizer, training.scheduler, {"step": last})
    parallel_state.destroy_model_parallel()
    return losses


def _go_on_and_train_all(rank: int, path: Path, layout: Layout) -> tuple[list[float | None], list[float | None]]:
    later = _train(rank, path, layout, "half", "halves", STEPS)
    return later, _train(rank, path, layout, None, "whole", STEPS)


@pytest.mark.parametrize("layout", [STAGES, ZERO1], ids=["stages", "zero1"])
def test_going_on_in_the_same_layout_is_exact(layout: Layout, tmp_path: Path) -> None:
    """With dropout, whose masks differ between the replicas and between the steps."""
    first = run_ranks(2, _train, tmp_path, layout, None, "half", STOP)[0]
    later, whole = run_ranks(2, _go_on_and_train_all, tmp_path, layout)[0]
    assert len(whole) == STEPS
    assert first + later == whole
    document, tensors = tensors_in(tmp_path / "halves")
    expected_document, expected = tensors_in(tmp_path / "whole")
    assert tensors.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == []
    for key in ("optimizer", "scheduler", "random"):
        assert document.content[key] == expected_document.content[key]


def _wander(rank: int, path: Path) -> tuple[list[float | None], list[float | None]]:
    """The second half in two layouts, and the whole training in the first layout."""
    (_, _), *others = WANDERING
    losses, source = [], "half"
    for layout, last in others:
        losses += _train(rank, path, layout, source, f"step_{last}", last)
        source = f"step_{last}"
    return losses, _train(rank, path, STAGES, None, "whole", STEPS)


def test_going_on_in_other_layouts_differs_by_rounding_alone(tmp_path: Path) -> None:
    path = tmp_path / "wandering"
    first = run_ranks(2, _train, path, STAGES, None, "half", STOP)[0]
    later, whole = run_ranks(2, _wander, path)[0]
    assert first == whole[:STOP]
    assert first + later == pytest.approx(whole, rel=1e-6)
    tensors, expected = tensors_in(path / f"step_{STEPS}")[1], tensors_in(path / "whole")[1]
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        distance = (tensors[name] - tensor).norm() / tensor.norm()
        assert distance <= 1e-6, (name, distance)
