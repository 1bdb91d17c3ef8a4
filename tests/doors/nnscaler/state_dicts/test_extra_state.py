"""Extra state of hand-made parts: what each rank holds of a module, and which state dicts a rank takes."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from nxdpp.checkpoint.distributed.rectangles import PlaceInWhole, placement_of
from nxdpp.doors.nnscaler.state_dicts.extra_state import (
    EXTRA_STATE_KEY,
    add_optimizer_extra_state,
    module_extra_state,
    parallel_modules,
    place_in,
    take_extra_state,
)
from nxdpp.doors.nnscaler.state_dicts.merged import wholes
from nxdpp.nnscaler import ComputeConfig
from nxdpp.tensor.layers import ColumnParallelLinear, ParallelEmbedding
from nxdpp.tensor.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxdpp.tensor.padding import Range

CONFIG = ComputeConfig(2, 2)


def _net(tied: bool = False) -> nn.Sequential:
    net = nn.Sequential(OrderedDict(a=nn.Linear(2, 3), b=nn.BatchNorm1d(3), c=nn.Linear(3, 3), d=nn.Linear(3, 3)))
    if tied:
        net.get_submodule("d")._parameters["weight"] = net.get_parameter("c.weight")
    return net


class Part(nn.Module):
    """Some of the layers of a whole module."""

    def __init__(self, whole: nn.Module, layers: str) -> None:
        super().__init__()
        self.__dict__["whole"] = whole
        for name in layers:
            self.add_module(name, whole.get_submodule(name))

    def nxdpp_extra_state(self) -> dict[str, Any]:
        return module_extra_state(vars(self)["whole"], self, CONFIG)


def test_a_part_names_the_whole_module() -> None:
    extra = Part(_net(tied=True), "ab").nxdpp_extra_state()

    assert extra["names"] == ["a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "c.bias", "d.bias"]
    assert extra["state_names"] == list(_net().state_dict())
    assert extra["tied"] == [["c.weight", "d.weight"]]
    assert list(extra["held"]) == list(Part(_net(), "ab").state_dict())
    assert extra["compute_config"]["plan_ngpus"] == 2
    assert (extra["version"], extra["rank"]) == (2, 0)


def test_an_optimizer_names_its_parameters_by_index() -> None:
    root = nn.Sequential(OrderedDict(first=nn.Linear(1, 1), heavy=Part(_net(tied=True), "cd"), last=nn.Linear(1, 1)))
    assert list(parallel_modules(root)) == ["heavy."]

    def described(*parameters: nn.Parameter) -> Any:
        return add_optimizer_extra_state(root, torch.optim.SGD(parameters), {})[EXTRA_STATE_KEY]

    extra = described(*root[2].parameters(), *root[1].parameters())

    assert extra["own"] == ["last.weight", "last.bias", "heavy.c.weight", "heavy.c.bias", "heavy.d.bias"]
    inner = ["a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "c.bias", "d.bias"]
    assert extra["names"] == [
        "first.weight", "first.bias", *(f"heavy.{name}" for name in inner), "last.weight", "last.bias",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"a parameter of shape \[7\] that is not in the module"):
        described(nn.Parameter(torch.zeros(7)))


def test_a_rank_takes_its_own_state_only() -> None:
    one, other = Part(_net(), "ab"), Part(_net(), "cd")
    state: dict[str, Any] = {"x.a.weight": torch.zeros(3, 2), f"x.{EXTRA_STATE_KEY}": one.nxdpp_extra_state()}

    take_extra_state(dict(state), "x.", one.nxdpp_extra_state())
    taken = dict(state)
    take_extra_state(taken, "x.", one.nxdpp_extra_state())
    assert list(taken) == ["x.a.weight"]
    take_extra_state(taken, "x.", one.nxdpp_extra_state())
    with pytest.raises(ValueError, match=r"each rank loads what it has saved. For another plan call merge_state_dicts"):
        take_extra_state(dict(state), "x.", other.nxdpp_extra_state())
    with pytest.raises(ValueError, match="or others: build the module as before the save"):
        take_extra_state(
            dict(state), "x.", Part(nn.Sequential(OrderedDict(a=nn.Linear(2, 3))), "a").nxdpp_extra_state()
        )
    state[f"x.{EXTRA_STATE_KEY}"]["version"] = 7
    with pytest.raises(ValueError, match="is not of version 2"):
        take_extra_state(dict(state), "x.", one.nxdpp_extra_state())


def test_parts_are_joined_with_blocks_and_padding() -> None:
    whole = torch.arange(24.0).view(2, 12)
    # Two blocks of six columns over two ranks, each padded to eight.
    parts = [
        PlaceInWhole((2, 12), (2, 8), 1, (Range(0, 0, 4), Range(6, 4, 4))),
        PlaceInWhole((2, 12), (2, 8), 1, (Range(4, 0, 2), Range(10, 4, 2))),
    ]

    taken = [(each, 0, each.part_of(whole)) for each in parts]

    assert taken[1][2].tolist() == [[4, 5, 0, 0, 10, 11, 0, 0], [16, 17, 0, 0, 22, 23, 0, 0]]
    assert torch.equal(_joined([taken[1], taken[0], taken[1]]), whole)
    with pytest.raises(ValueError, match="w lacks 8 elements: give the state dicts of all ranks"):
        _joined(taken[:1])
    # Flat shards that begin inside rows, of which one stands twice.
    shards = [(each, at, each.part_of(whole, at, at + 8)) for each in parts for at in (0, 4, 8)]
    assert shards[1][2].tolist() == [6, 7, 8, 9, 12, 13, 14, 15]
    assert torch.equal(_joined(shards), whole)
    assert _joined([(placement_of(whole), 0, whole)]) is whole


def _joined(pieces: list[tuple[PlaceInWhole, int, torch.Tensor]]) -> Any:
    return wholes(("w", *piece) for piece in pieces)["w"]


class Divided(nn.Module):
    """Rows behind a vocabulary, parts that two ranks hold, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = ParallelEmbedding(6, 4)
        self.keys = GQAQKVColumnParallelLinear(4, [16, 8], kv_size_multiplier=2)
        self.blocks = ColumnParallelLinear(4, 12, stride=2, pad=True)
        self.norm = nn.LayerNorm(4)


def test_placements_are_those_of_the_layers() -> None:
    parts: dict[str, list[Any]] = {}
    for rank in range(4):
        parallel_state.initialize_debug(tensor_model_parallel_size=4, tensor_model_parallel_rank=rank)
        try:
            module = Divided()
            for name, held in module_extra_state(module, module, CONFIG)["held"].items():
                assert place_in(held) == placement_of(module.state_dict(keep_vars=True)[name]), name
                parts.setdefault(name, []).append(place_in(held))
        finally:
            parallel_state.destroy_model_parallel()
    for name, placements in parts.items():
        whole = torch.rand(placements[0].shape)
        assert torch.equal(_joined([(each, 0, each.part_of(whole)) for each in placements]), whole), name
    assert parts["rows.weight"][0].shape == (6, 4)
    assert parts["keys.weight_k"][0] == parts["keys.weight_k"][1] != parts["keys.weight_k"][2]
    assert len(parts["blocks.weight"][0].ranges) == 2
