"""State dicts of one rank's part: used as any, and never written as the whole; averages (EMA) over a rank's part."""

import copy
import io
import logging
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import nxdpp
from nxdpp import NxDPPModel, parallel_state
from nxdpp.gradients.state_part import StatePart
from nxdpp.optimizer import Zero1Optimizer
from tests.pipeline.after_wrapping.scripts import Layer, Plain, batch
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
        lambda: pickle.dumps(copy.copy(state)),
        lambda: save_file(state, folder / f"{rank}.safetensors"),
        lambda: torch.save(of_optimizer, io.BytesIO()),
        lambda: torch.save([of_optimizer], io.BytesIO()),
    ):
        with pytest.raises(RuntimeError) as caught:
            save()
        messages.append(str(caught.value))
    _used_as_any(model, state, optimizer, of_optimizer)
    _remedies(rank, model, optimizer, folder)
    return messages


def _used_as_any(model: NxDPPModel, state: Any, optimizer: torch.optim.Optimizer, of_optimizer: Any) -> None:
    names = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]
    assert isinstance(state, dict)
    assert sorted(state) == sorted(names) == sorted(state.keys())
    assert all(torch.equal(value, model.local_state_dict()[name]) for name, value in state.items())
    best = copy.deepcopy(state)
    for parameter in model.parameters():
        parameter.data.zero_()
    model.load_state_dict(best)
    assert all(torch.equal(value, best[name]) for name, value in model.state_dict().items())
    assert any(value.any() for value in best.values())
    optimizer.load_state_dict(of_optimizer)
    assert optimizer.state_dict().keys() == of_optimizer.keys()
    plain: Any = dict(state.items())
    assert type(dict(state)) is dict
    assert plain.keys() == state.keys()
    assert vars(state)["_metadata"]


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


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_a_part_is_not_written_as_the_whole(ranks: int, tmp_path: Path) -> None:
    first = run_ranks(ranks, _saves, ranks, tmp_path)[0]

    whole = len(Plain().state_dict())
    for message in first[:5]:
        count = int(message.partition(" has the ")[2].partition(" tensors")[0])
        assert 0 < count < whole
        assert all(name in message for name in ("save_checkpoint", "save_pretrained", "local_state_dict()"))
    for message in first[5:]:
        assert message.startswith("optimizer.state_dict() has the state of ")
        assert all(name in message for name in ("save_checkpoint", "save_pretrained", "local_state_dict()"))
    assert not list(tmp_path.glob("*.safetensors"))


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


def test_what_a_replica_holds_as_a_whole_is_written() -> None:
    assert "save_checkpoint" in run_ranks(2, _of_replicas)[0][0]
    assert "model.state_dict() has the" in run_ranks(2, _of_shards)[0][0]


Update = Callable[[], dict[str, torch.Tensor]]


def _clones(model: nn.Module) -> Update:
    """As diffusers' EMAModel and torch_ema: a list beside ``parameters()``."""
    shadow = [parameter.detach().clone() for parameter in model.parameters()]

    def update() -> dict[str, torch.Tensor]:
        for kept, parameter in zip(shadow, model.parameters(), strict=True):
            kept.sub_((1 - _DECAY) * (kept - parameter.detach()))
        return dict(zip((name for name, _ in model.named_parameters()), shadow, strict=True))

    return update


def _states(model: nn.Module) -> Update:
    """As timm's ModelEma: a copy of the state dict."""
    kept = copy.deepcopy(model.state_dict())

    def update() -> dict[str, torch.Tensor]:
        for name, value in model.state_dict().items():
            kept[name].mul_(_DECAY).add_(value, alpha=1 - _DECAY)
        return dict(kept)

    return update


def _averaged(model: nn.Module) -> Update:
    """As the message for ``AveragedModel(model)`` advises."""
    part = model.local_module if isinstance(model, NxDPPModel) else model
    averaged = AveragedModel(part, multi_avg_fn=get_ema_multi_avg_fn(_DECAY))

    def update() -> dict[str, torch.Tensor]:
        averaged.update_parameters(part)
        return dict(averaged.module.state_dict())

    return update


_AVERAGES = (_clones, _states, _averaged)


def _trained(model: nn.Module, losses: Callable[[], Any]) -> list[dict[str, torch.Tensor]]:
    updates = [make(model) for make in _AVERAGES]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    kept: list[dict[str, torch.Tensor]] = []
    for _ in range(3):
        losses()
        optimizer.step()
        optimizer.zero_grad()
        kept = [update() for update in updates]
    return kept


def _averages(rank: int, ranks: int) -> list[dict[str, torch.Tensor]]:
    model = _model(ranks)
    kept = _trained(model, lambda: model.run_train(**batch()))
    # The averages as the weights of the model.
    model.load_state_dict(kept[1])
    assert all(torch.equal(value, kept[1][name]) for name, value in model.state_dict().items())
    return kept


def _one_process() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Plain()

    def losses() -> None:
        ids, labels = batch().values()
        for part in zip(ids.chunk(2), labels.chunk(2), strict=True):
            (model(*part) / 2).backward()

    return _trained(model, losses)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_an_average_over_a_ranks_parameters_is_one_process_s(ranks: int) -> None:
    expected = _one_process()

    found = run_ranks(ranks, _averages, ranks)

    for number, whole in enumerate(expected):
        names: set[str] = set()
        for of_rank in found:
            assert all(torch.equal(value, whole[name]) for name, value in of_rank[number].items())
            names |= of_rank[number].keys()
        assert names >= {name for name in whole if name != "scale"}
    assert not torch.equal(expected[0]["head.weight"], Plain().head.weight)


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


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_an_average_of_the_whole_model_does_not_go_stale(ranks: int) -> None:
    for by_names, by_order in run_ranks(ranks, _stale, ranks):
        assert "is not in this rank's part" in by_names
        assert f"AveragedModel has {len(list(Plain().parameters()))} parameters" in by_order
        assert "AveragedModel(model.local_module)" in by_order


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


def _listed_beside(model: nn.Module, module_of_another: Any) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def _beside_a_copy(rank: int, ranks: int) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nxdpp").addHandler(handler)
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
        assert len([line for line in lines if "average (EMA)" in line]) == 1, lines
    lines.clear()
    assert _listed_beside(models[2], models[1].original_module)
    assert not [line for line in lines if "an average (EMA)" in line]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_an_average_over_a_copy_of_the_whole_model_is_warned_of(ranks: int) -> None:
    run_ranks(ranks, _beside_a_copy, ranks)


def test_a_plain_dict_of_a_part_is_plain() -> None:
    state = StatePart.of({"weight": torch.ones(1)}, "refused")

    assert {**state} == dict(state)
    assert type({**state}) is dict
    # As libraries move the values of any mapping.
    for made in (type(state)((key, value.cpu()) for key, value in state.items()), state | {"step": 1}):
        with pytest.raises(RuntimeError, match=r"has tensors of this rank's part .* nxdpp\.save_checkpoint"):
            pickle.dumps(made)
    with pytest.raises(KeyError, match="'bias' is not in this rank's part"):
        state["bias"]
    assert state.get("bias") is None
    assert "bias" not in state
