"""Names of wrapped modules, and state of modules that is neither a parameter nor a buffer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint


class Odd(nn.Module):
    """Buffers of several dtypes, a transposed weight and a parametrised one."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.layer = parametrizations.weight_norm(nn.Linear(4, 4))
        self.turned = nn.Parameter(torch.rand(3, 5).t())
        self.waves = nn.Parameter(torch.rand(4, dtype=torch.complex64))
        self.register_buffer("steps", torch.tensor(seed + 3))
        self.register_buffer("mask", torch.rand(6) > 0.5)
        self.register_buffer("small", torch.rand(6).to(torch.float8_e4m3fn))
        self.register_buffer("nothing", None)
        self.register_buffer("scratch", torch.full((2,), float(seed)), persistent=False)


def _values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and value.tolist() == other[name].tolist() for name, value in one.items()
    )


def test_odd_tensors_come_back_and_others_stay(tmp_path: Path) -> None:
    saved, loaded = Odd(), Odd(1)
    save_checkpoint(tmp_path, "saved", saved)
    assert not _is_equal(_values(saved), _values(loaded))
    load_checkpoint(tmp_path, "saved", loaded)
    assert _is_equal(_values(saved), _values(loaded))
    assert loaded.get_buffer("scratch").tolist() == [1.0, 1.0]
    assert loaded.turned.stride() == (1, 5)


def test_wrapped_modules_have_the_names_of_the_module(one_rank: None, tmp_path: Path) -> None:
    def net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    wrappers: list[Callable[[nn.Module], Any]] = [
        lambda module: module,
        lambda module: DistributedDataParallel(torch.compile(module, backend="eager")),
    ]
    for seed, wrap in enumerate(wrappers):
        save_checkpoint(tmp_path, str(seed), wrap(net(seed)))
        for other in wrappers:
            module = net(10)
            load_checkpoint(tmp_path, str(seed), other(module))
            assert _is_equal(_values(module), _values(net(seed)))


class WithExtraState(nn.Linear):
    """A layer whose state dict has a number."""

    def get_extra_state(self) -> Any:
        """Return a number."""
        return {"calls": 3}


class Forgetful(nn.Linear):
    """A layer whose state dict lacks a parameter."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + "bias"]


def _sparse() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("graph", torch.eye(3).to_sparse())
    return module


def test_state_that_a_load_could_not_give_back_is_refused(one_rank: None, tmp_path: Path) -> None:
    columns = nn.Linear(2, 3)
    columns.weight = nn.Parameter(DTensor.from_local(torch.ones(3, 2), init_device_mesh("cpu", (1,)), [Shard(1)]))
    others: list[tuple[nn.Module, str]] = [
        (nn.Sequential(WithExtraState(2, 2)), "0._extra_state of the model's state dict is no parameter"),
        (nn.Sequential(Forgetful(2, 2)), "state dict leaves out 0.bias, which a load could not give back"),
        (_sparse(), "graph is a Tensor of layout torch.sparse_coo"),
        (nn.Linear(2, 2, device="meta"), "on the meta device, without values"),
        (columns, r"weight is a DTensor of \[Shard\(dim=1\)\], and a checkpoint holds"),
    ]
    for module, message in others:
        with pytest.raises(ValueError, match=message):
            save_checkpoint(tmp_path, "saved", module)
    assert not any(tmp_path.iterdir())


def test_an_expanded_buffer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    def build() -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("row", torch.ones(1).expand(4))
        return module

    save_checkpoint(tmp_path, "saved", build())
    other = build()
    before = _values(other)
    with pytest.raises(ValueError, match=r"row is an expanded tensor, whose elements share memory: make it by .clone"):
        load_checkpoint(tmp_path, "saved", other)
    assert _is_equal(before, _values(other))
    # The remedy.
    other.register_buffer("row", torch.zeros(1).expand(4).clone())
    load_checkpoint(tmp_path, "saved", other)
    assert other.get_buffer("row").tolist() == [1.0] * 4


class Tied(nn.Module):
    """Two layers, of which the second has the weight of the first where they are tied."""

    def __init__(self, are_tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        if are_tied:
            self.second.weight = self.first.weight


def test_a_tied_weight_goes_to_both_layers_of_a_model_without_ties(tmp_path: Path) -> None:
    saved, loaded = Tied(True), Tied(False)
    save_checkpoint(tmp_path, "saved", saved)
    load_checkpoint(tmp_path, "saved", loaded)
    assert loaded.second.weight is not loaded.first.weight
    for name, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
