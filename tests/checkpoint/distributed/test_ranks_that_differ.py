"""Models without values, replicas that differ, and ranks that a checkpoint does not fit: two stages, two replicas."""

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

import nxdpp
from nxdpp import NxDPPModel, parallel_state
from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint
from tests.checkpoint.distributed.layouts import Layout, Training
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import batch, make


def _llama(seed: int = 0) -> nn.Module:
    model: nn.Module = make("llama", seed, num_hidden_layers=2, tie_word_embeddings=True)
    return model


class Normed(nn.Module):
    """Two layers with batch norms, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of the squares of the result for ``x`` ``(rows, 4)``."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _on_all(rank: int, path: Path) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    return {name: case(rank, path / name) for name, case in CASES.items()}


def _state_of(training: Training) -> dict[str, Any]:
    """All that a load may change."""
    return copy.deepcopy(
        {
            "model": dict(training.model.local_state_dict()),
            "optimizer": training.optimizer.state_dict(),
            "scheduler": training.scheduler.state_dict(),
            "random": torch.get_rng_state(),
        }
    )


def _error(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _without_values(rank: int, path: Path) -> list[str]:
    """Load into models on the meta device, made in two ways; return the names that differ."""
    saved = Training(_llama, Layout(2))
    saved.step(batch())
    save_checkpoint(path, "saved", saved.model, saved.optimizer, saved.scheduler)

    def meta() -> nn.Module:
        with torch.device("meta"):
            return _llama(1)

    wrong = []
    for build in (meta, lambda: nxdpp.deferred_init(_llama, 1)):
        model = NxDPPModel(build(), num_microbatches=2)
        load_checkpoint(path, "saved", model)
        model.move_model_to_device()
        # Buffers that are not persistent, too.
        expected = {**dict(saved.model.local_named_parameters()), **dict(saved.model.local_named_buffers())}
        found = {**dict(model.local_named_parameters()), **dict(model.local_named_buffers())}
        wrong += [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
        wrong += [name for name in found if name not in expected]
        loss = model.run_train(**batch())
        other = saved.model.run_train(**batch())
        saved.optimizer.zero_grad()
        assert not isinstance(loss, list)
        assert not isinstance(other, list)
        if loss is not None and (other is None or not torch.equal(loss, other)):
            wrong.append("the loss")
    return wrong


def _optimizer_without_values(rank: int, path: Path) -> tuple[str, bool]:
    """Load into a model without values whose optimizer was made too early."""
    training = Training(_llama, Layout(2))
    save_checkpoint(path, "saved", training.model, training.optimizer)
    with torch.device("meta"):
        model = NxDPPModel(_llama(1), num_microbatches=2)
    optimizer = AdamW(model.local_parameters(), lr=0.1)
    error = _error(lambda: load_checkpoint(path, "saved", model))
    save_error = _error(lambda: save_checkpoint(path, "meta", model))
    assert optimizer.param_groups
    return f"{error} {save_error}", all(parameter.is_meta for parameter in model.local_parameters())


def _statistics(rank: int, path: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train a model with batch norms; return the statistics of this rank, before and after a load."""
    torch.manual_seed(0)
    model = NxDPPModel(Normed(), transformer_layer_cls=nn.Sequential)
    model.move_model_to_device()
    replica = parallel_state.get_data_parallel_rank()
    model.run_train(x=torch.randn(6, 4, generator=torch.Generator().manual_seed(replica)))
    before = [buffer.clone() for buffer in model.local_buffers()]
    save_checkpoint(path, "saved", model)
    load_checkpoint(path, "saved", model)
    return before, list(model.local_buffers())


def _apart(rank: int, path: Path) -> tuple[str, bool]:
    """Save replicas of which one has changed."""
    training = Training(_llama, Layout(2))
    if rank == 3:
        with torch.no_grad():
            next(training.model.local_parameters()).add_(1.0)
    error = _error(lambda: save_checkpoint(path, "saved", training.model, training.optimizer))
    return error, path.exists()


def _refused(rank: int, path: Path) -> dict[str, tuple[str, bool]]:
    """Load into parts of which that of rank 3 alone does not fit; return the error, and whether something changed."""
    training = Training(_llama, Layout(2))
    training.step(batch())
    save_checkpoint(path, "saved", training.model, training.optimizer, training.scheduler)
    results = {}
    for name, spoil in SPOILT.items():
        other = Training(lambda: _llama(1), Layout(2))
        other.step(batch())
        if rank == 3:
            spoil(other)
        before = _state_of(other)
        arguments = other.model, other.optimizer, other.scheduler
        error = _error(partial(load_checkpoint, path, "saved", *arguments))
        results[name] = error, _is_changed(before, _state_of(other))
    return results


def _is_changed(before: Any, after: Any) -> bool:
    if isinstance(before, dict):
        return before.keys() != after.keys() or any(_is_changed(before[key], after[key]) for key in before)
    if isinstance(before, list | tuple):
        return len(before) != len(after) or any(map(_is_changed, before, after))
    return not (torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after)


def _norm(training: Training) -> nn.Module:
    return training.model.local_module.get_submodule("model.norm")


def _wider(training: Training) -> None:
    _norm(training).weight.data = torch.ones(33)


def _with_more(training: Training) -> None:
    _norm(training).register_buffer("more", torch.ones(2))


def _other_options(training: Training) -> None:
    first, second = training.optimizer.param_groups
    first["params"] += second["params"]
    second["params"] = []


SPOILT: dict[str, Callable[[Training], None]] = {
    "shape": _wider,
    "name": _with_more,
    "groups": _other_options,
}
MESSAGES = {
    "shape": r"model.norm.weight is of shape \[32\]",
    "name": "lacks model.norm.more",
    "groups": r"param_groups\[0\] has .*, whose weight_decay differs in the checkpoint: 0.1 and 0.0",
}
CASES: dict[str, Callable[[int, Path], Any]] = {
    "without values": _without_values,
    "optimizer without values": _optimizer_without_values,
    "statistics": _statistics,
    "apart": _apart,
    "refused": _refused,
}


def test_ranks_whose_parts_differ(tmp_path: Path) -> None:
    results = run_ranks(4, _on_all, tmp_path)
    assert [each["without values"] for each in results] == [[]] * 4
    for each in results:
        error, is_unchanged = each["optimizer without values"]
        assert "Make the optimizer after load_checkpoint" in error
        assert "the model has tensors on the meta device" in error
        assert is_unchanged
        error, is_written = each["apart"]
        assert re.search("has other values on rank 3 than on rank [0-2], which has the same part of it", error)
        assert not is_written
        # One rank that does not fit changes no rank.
        for name, message in MESSAGES.items():
            error, is_changed = each["refused"][name]
            assert re.search(message, error), error
            assert error.startswith("ValueError")
            assert not is_changed
    # Statistics are those of the first replica. Ranks 0 and 1, or 0 and 2, are the replicas of the first stage.
    of_ranks = [each["statistics"] for each in results]
    for _, after in of_ranks:
        assert any(all(map(torch.equal, after, before)) for before, _ in of_ranks)
    assert sum(not all(map(torch.equal, before, after)) for before, after in of_ranks) == 2
