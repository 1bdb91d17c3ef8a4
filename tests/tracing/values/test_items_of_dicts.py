"""Dicts that modules return are read by keys, and each item is a value of its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.graph.trace import TracedGraph
from tests.support.exact import assert_exact
from tests.support.traced_models import PlainLayer, options_for, run_graph, trace_with

WIDTH = 8
WEIGHTS = {"mask": 2.0, "dice": 0.5}
Losses = dict[str, Tensor]


class _Criterion(nn.Module):
    """Losses of the rows that NumPy chooses. ``names`` gives the keys for a number that data tell."""

    def __init__(self, names: Callable[[float], dict[str, str]]) -> None:
        super().__init__()
        self.names = names

    def forward(self, x: Tensor, targets: list[Tensor]) -> Losses:
        order = x.detach().sum(-1).numpy().argsort(-1)
        chosen = torch.stack([row[torch.as_tensor(one)[:2]] for row, one in zip(x, order, strict=True)])
        wanted = torch.stack(targets)[:, :2]
        losses = {"mask": functional.mse_loss(chosen, wanted), "dice": functional.l1_loss(chosen, wanted)}
        return {name: losses[kind] for name, kind in self.names(float(x.detach().sum())).items()}


class _Model(nn.Module):
    def __init__(self, total: Callable[[Any], Any], names: Callable[[float], dict[str, str]] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PlainLayer(WIDTH) for _ in range(4))
        self.criterion = _Criterion(names or (lambda number: {"mask": "mask", "dice": "dice"}))
        self.total = total

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.total(self.criterion(x, list(targets)))


class _Totals(_Model):
    """The sum of all ways to read a dict of losses."""

    def __init__(self) -> None:
        super().__init__(sum)

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return sum(total(self.criterion(x, list(targets))) for total in TOTALS)


def _weighted_in_place(losses: Losses) -> Any:
    for key, weight in WEIGHTS.items():
        for name, loss in losses.items():
            if key in name:
                loss *= weight
    return sum(losses.values())


def _by_keys(losses: Losses) -> Any:
    return sum(losses[name] * WEIGHTS[name] for name in losses if name in WEIGHTS) + losses["mask"]


def _read_again(losses: Losses) -> Any:
    for loss in losses.values():
        loss *= 3
    return losses["mask"] - losses["dice"]


def _copied(losses: Losses) -> Any:
    more = {**losses, "more": losses["mask"] ** 2}
    return sum(more.values()) / len(losses)


def _replaced(losses: Losses) -> Any:
    for name in list(losses.keys()):
        losses[name] = losses[name] * WEIGHTS[name]
    return losses["mask"] + losses["dice"]


TOTALS = (_weighted_in_place, _by_keys, _read_again, _copied, _replaced)


def _inputs(rows: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(rows, 3, WIDTH), "targets": torch.randn(rows, 3, WIDTH)}


def _trace(model: nn.Module) -> TracedGraph:
    return trace_with(model, _inputs(), options_for(model, PlainLayer))


def test_a_dict_of_losses_that_data_decide_is_exact() -> None:
    torch.manual_seed(0)
    assert_exact(_Totals(), _inputs(8), stages=2, layer_class=PlainLayer)


def test_a_dict_with_an_item_that_changed_in_place_is_refused() -> None:
    def scaled(losses: Losses) -> Any:
        for loss in losses.values():
            loss *= 2
        return losses

    with pytest.raises(TracingError, match="is used after its item 'mask' was changed in place"):
        _trace(_Model(scaled))


def test_keys_that_data_change_are_an_error() -> None:
    # Examples are positive.
    model = _Model(_weighted_in_place, lambda number: {"mask" if number > 0 else "dice": "mask"})
    traced = _trace(model)
    for parameter in model.layers.parameters():
        nn.init.constant_(parameter, -1.0)

    with pytest.raises(RuntimeError, match="data decide about a size between layers: the answer to keys_of"):
        run_graph(model, traced, _inputs())
