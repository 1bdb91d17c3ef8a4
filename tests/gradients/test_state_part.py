"""State dicts of one rank's part: never written as the whole; averages (EMA) over a rank's part."""

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

import nxdpp
from nxdpp import NxDPPModel, parallel_state
from nxdpp.optimizer import Zero1Optimizer
from tests.pipeline.after_wrapping.scripts import Layer, Plain, batch
from tests.support.kept_messages import KeptMessages
from tests.support.run_ranks import run_ranks

_DECAY = 0.9


def _model(ranks: int, replicas: int = 1, **more: Any) -> NxDPPModel:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks // replicas)
    torch.manual_seed(0)
    return NxDPPModel(Plain(), transformer_layer_cls=Layer, num_microbatches=2, **more)


def _saves(rank: int, ranks: int, folder: Path) -> list[str]:
    model = _model(ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.run_train(**batch())
    optimizer.step()
    state, of_optimizer = model.state_dict(), optimizer.state_dict()
    messages = []
    for save in (
        lambda: torch.save(state, io.BytesIO()),
        lambda: torch.save({"model": state, "step": 1}, io.BytesIO()),
        lambda: pickle.dumps(copy.deepcopy(state)),
        lambda: save_file(state, folder / f"{rank}.safetensors"),
        lambda: torch.save(of_optimizer, io.BytesIO()),
    ):
        with pytest.raises(RuntimeError) as caught:
            save()
        messages.append(str(caught.value))
    _remedies(rank, model, optimizer, folder)
    return messages


def _remedies(rank: int, model: NxDPPModel, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    own = folder / f"part-{rank}.pt"
    torch.save({"model": model.local_state_dict(), "optimizer": dict(optimizer.state_dict())}, own)
    read = torch.load(own, weights_only=True)
    model.load_state_dict(read["model"])
    optimizer.load_state_dict(read["optimizer"])
    nxdpp.save_checkpoint(folder, "last", model, optimizer)
    nxdpp.load_checkpoint(folder, "last", model, optimizer)
    # A loaded state is a part before the first step too.
    again = torch.optim.AdamW(model.parameters())
    nxdpp.load_checkpoint(folder, "last", model, again)
    with pytest.raises(RuntimeError, match=r"optimizer\.state_dict\(\) has the state of"):
        torch.save(again.state_dict(), io.BytesIO())


def _of_replicas(rank: int) -> list[str]:
    model = _model(2, replicas=2)
    torch.save(model.state_dict(), io.BytesIO())
    adam = torch.optim.AdamW(model.parameters())
    model.run_train(**batch())
    adam.step()
    torch.save(adam.state_dict(), io.BytesIO())
    shared = Zero1Optimizer(list(model.parameters()), torch.optim.AdamW)
    with pytest.raises(RuntimeError, match=r"optimizer\.state_dict\(\) has the state of") as caught:
        torch.save(shared.state_dict(), io.BytesIO())
    torch.save(dict(shared.state_dict()), io.BytesIO())
    return [str(caught.value)]


def _of_shards(rank: int) -> list[str]:
    model = _model(2, replicas=2)
    nxdpp.fully_shard(model)
    with pytest.raises(RuntimeError) as caught:
        torch.save(model.state_dict(), io.BytesIO())
    return [str(caught.value)]


def _writes(rank: int, folder: Path) -> tuple[list[str], str, str]:
    found = _saves(rank, 2, folder)
    parallel_state.destroy_model_parallel()
    (of_replicas,) = _of_replicas(rank)
    parallel_state.destroy_model_parallel()
    (of_shards,) = _of_shards(rank)
    return found, of_replicas, of_shards


def test_a_part_is_not_written_as_the_whole(tmp_path: Path) -> None:
    """Also: write what a replica holds as a whole."""
    first, of_replicas, of_shards = run_ranks(2, _writes, tmp_path)[0]

    whole = len(Plain().state_dict())
    for message in first[:4]:
        count = int(message.partition(" has the ")[2].partition(" tensors")[0])
        assert 0 < count < whole
    for message in first[4:]:
        assert message.startswith("optimizer.state_dict() has the state of ")
    for message in first:
        assert all(name in message for name in ("save_checkpoint", "save_pretrained", "local_state_dict()"))
    assert not list(tmp_path.glob("*.safetensors"))
    assert "save_checkpoint" in of_replicas
    assert "model.state_dict() has the" in of_shards


def _average_by_names(kept: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in kept.named_parameters():
        parameter.data.mul_(_DECAY).add_(values[name].data, alpha=1 - _DECAY)


def _stale(rank: int, ranks: int) -> list[str]:
    torch.manual_seed(0)
    whole, early = Plain(), AveragedModel(Plain())
    model = _model(ranks)
    messages = []
    with pytest.raises(KeyError) as by_names:
        _average_by_names(whole, model.state_dict())
    messages.append(str(by_names.value))
    before = copy.deepcopy(early.state_dict())
    with pytest.raises(RuntimeError) as by_order:
        early.update_parameters(model)
    messages.append(str(by_order.value))
    assert all(torch.equal(value, before[name]) for name, value in early.state_dict().items())
    with pytest.raises(TypeError, match=r"AveragedModel\(model\.local_module"):
        AveragedModel(model)
    with pytest.raises(RuntimeError, match="another rank holds"):
        _average_by_names(whole, dict(model.original_module.named_parameters()))
    # What the message advises, with either name of the part.
    averaged = AveragedModel(model.local_module)
    averaged.update_parameters(model.local_module)
    averaged.update_parameters(model)
    return messages


def _by_order(kept: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for one, other in zip(kept.parameters(), model.parameters(), strict=False):
            if one.shape == other.shape:
                one.mul_(_DECAY).add_(other, alpha=1 - _DECAY)


class _Average:
    """As the classes of public repositories."""

    def __init__(self, model: nn.Module) -> None:
        self.kept = copy.deepcopy(model)

    def update(self, model: nn.Module) -> None:
        of_model = dict(model.named_parameters())
        for name, parameter in self.kept.named_parameters():
            if name in of_model:
                parameter.data.mul_(_DECAY).add_(of_model[name].data, alpha=1 - _DECAY)


def _beside_a_copy(rank: int, ranks: int) -> None:
    lines = KeptMessages("average (EMA)").texts
    teacher = Plain()
    average = _Average(teacher)
    updates: list[Callable[[nn.Module], None]] = [lambda wrapped: _by_order(teacher, wrapped), average.update]
    models: list[Any] = [_model(ranks) for _ in range(3)]
    for model, update in zip(models, updates, strict=False):
        lines.clear()
        model.run_train(**batch())
        for _ in range(2):
            update(model)
        # As the warning advises.
        part = model.local_module
        kept = copy.deepcopy(part)
        with torch.no_grad():
            for one, other in zip(kept.parameters(), part.parameters(), strict=True):
                one.lerp_(other + 1, 0.5)
        for one, other in zip(kept.parameters(), part.parameters(), strict=True):
            torch.testing.assert_close(one, other + 0.5)
        assert len(lines) == 1, lines


def _all_averages(rank: int) -> list[str]:
    stale = _stale(rank, 2)
    parallel_state.destroy_model_parallel()
    _beside_a_copy(rank, 2)
    return stale


def test_an_average_of_the_whole_model_is_refused_or_warned_of() -> None:
    """It would go stale: another rank has the rest."""
    for by_names, by_order in run_ranks(2, _all_averages):
        assert "is not in this rank's part" in by_names
        assert f"AveragedModel has {len(list(Plain().parameters()))} parameters" in by_order
        assert "AveragedModel(model.local_module)" in by_order
