"""The record of changes: it moves for each kind of change, and a steady look makes no call for a module."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from nxdpp.pipeline.local.changes import Change, ChangeRecord
from nxdpp.pipeline.local.local_module import LocalModule


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.linear(x))


def tree_of(layers: int) -> LocalModule:
    tree, below = LocalModule(), nn.Module()
    tree.add_module("layers", below)
    for number in range(layers):
        below.add_module(str(number), Block())
    tree.add_module("head", nn.Linear(4, 2))
    tree.register_buffer("scale", torch.ones(()))
    return tree


def followed(tree: nn.Module) -> ChangeRecord:
    """A record of ``tree`` that has been asked often enough to compare only what each step compares."""
    record = ChangeRecord()
    record.follow(tree, [tree, tree.get_submodule("layers")])
    for _ in range(3):
        record.look()
    return record


def kinds_after(change: Callable[[nn.Module], object]) -> set[Change]:
    tree = tree_of(3)
    record = followed(tree)
    before = record.number
    change(tree)
    record.look()
    kinds = {kind for kind in Change if record.last([kind]) > before}
    after = record.number
    for _ in range(3):
        assert record.look() == after or kinds == {Change.HOOK}
    return kinds


def at(tree: nn.Module, name: str) -> Any:
    return tree.get_submodule(name)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda tree: setattr(at(tree, "layers.1"), "norm", nn.Identity()), Change.MODULE),
        (lambda tree: at(tree, "layers.1").add_module("more", nn.Linear(4, 4)), Change.MODULE),
        (lambda tree: at(tree, "layers")._modules.pop("2"), Change.MODULE),
        (lambda tree: setattr(at(tree, "layers.0.linear"), "weight", nn.Parameter(torch.ones(4, 4))), Change.PARAMETER),
        (lambda tree: at(tree, "head").to("meta"), Change.PARAMETER),
        (lambda tree: weight_norm(at(tree, "layers.1.linear")), Change.MODULE),
        (lambda tree: tree._buffers.pop("scale"), Change.BUFFER),
        (lambda tree: at(tree, "layers.1.norm").requires_grad_(False), Change.GRADIENT),
        (lambda tree: at(tree, "layers.1").eval(), Change.MODE),
        (lambda tree: at(tree, "layers").register_forward_hook(print), Change.HOOK),
        (lambda tree: tree.register_full_backward_pre_hook(print), Change.HOOK),
        (lambda tree: setattr(tree, "forward", len), Change.FORWARD),
        (lambda tree: at(tree, "layers.1").double(), Change.MOVE),
    ],
)
def test_each_kind_of_change_moves_the_record(change: Callable[[nn.Module], object], kind: Change) -> None:
    # Modules bring their parameters.
    brought = {Change.PARAMETER} if kind is Change.MODULE else set()
    assert kinds_after(change) - brought == {kind}


def test_a_write_without_a_hook_inside_a_layer_is_found_by_a_later_look() -> None:
    tree = tree_of(3)
    record = followed(tree)
    before = record.number
    at(tree, "layers.1")._modules.pop("norm")
    numbers = [record.look() for _ in range(4)]
    assert numbers[-1] > before
