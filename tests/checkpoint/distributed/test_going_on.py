"""Going on in new processes: to the bit in the same layout, and but for rounding in others."""

from pathlib import Path

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint
from tests.checkpoint.distributed.layouts import Layout, Training, tensors_in
from tests.support import models, tensor_models
from tests.support.run_ranks import run_ranks

STEPS, STOP = 6, 2
MEAN_LOSS = {"broadcast_and_average_loss": True}
STAGES, ZERO1, TENSOR = Layout(2, 1, False, MEAN_LOSS), Layout(1, 1, True, MEAN_LOSS), Layout(1, 2, False, MEAN_LOSS)


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


def _begin(rank: int, path: Path) -> list[list[float | None]]:
    """Halves and whole trainings: with dropout, whose masks differ between the replicas, and without."""
    return [
        _train(rank, folder, layout, None, name, last)
        for folder, layout in ((path, ZERO1), (path / "wandering", STAGES))
        for name, last in (("half", STOP), ("whole", STEPS))
    ]


def _go_on(rank: int, path: Path) -> list[list[float | None]]:
    later = _train(rank, path, ZERO1, "half", "halves", STEPS)
    wandering = path / "wandering"
    others = _train(rank, wandering, ZERO1, "half", "middle", STOP + 2)
    return [later, others + _train(rank, wandering, TENSOR, "middle", "halves", STEPS)]


def test_going_on_in_new_processes(tmp_path: Path) -> None:
    half, whole, other_half, other_whole = run_ranks(2, _begin, tmp_path)[0]
    later, others = run_ranks(2, _go_on, tmp_path)[0]
    assert len(whole) == STEPS
    assert half + later == whole
    document, tensors = tensors_in(tmp_path / "halves")
    expected_document, expected = tensors_in(tmp_path / "whole")
    assert tensors.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == []
    for key in ("optimizer", "scheduler", "random"):
        assert document.content[key] == expected_document.content[key]
    # Other layouts differ by rounding alone.
    assert other_half == other_whole[:STOP]
    assert other_half + others == pytest.approx(other_whole, rel=1e-6)
    tensors, expected = (tensors_in(tmp_path / "wandering" / name)[1] for name in ("halves", "whole"))
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        distance = (tensors[name] - tensor).norm() / tensor.norm()
        assert distance <= 1e-6, (name, distance)


def _three_replicas(rank: int, path: Path) -> list[str]:
    """Names of the parameters whose values differ after a load in the middle."""
    parallel_state.initialize_model_parallel()

    def step(of: Training, number: int) -> None:
        ids = torch.randint(0, models.VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(100 * number + rank))
        of.step({"input_ids": ids, "labels": ids})

    whole, resumed = (Training(_llama, Layout()) for _ in range(2))
    step(whole, 0)
    save_checkpoint(path, "middle", whole.model, whole.optimizer, whole.scheduler)
    load_checkpoint(path, "middle", resumed.model, resumed.optimizer, resumed.scheduler)
    for each in (whole, resumed):
        step(each, 1)
        step(each, 2)
    expected = dict(whole.model.local_named_parameters())
    return [name for name, each in resumed.model.local_named_parameters() if not torch.equal(each, expected[name])]


def test_the_first_step_after_a_load_averages_in_the_order_of_the_others(tmp_path: Path) -> None:
    """Over more replicas than two, the order of a sum shows in its last bit."""
    assert run_ranks(3, _three_replicas, tmp_path) == [[], [], []]
