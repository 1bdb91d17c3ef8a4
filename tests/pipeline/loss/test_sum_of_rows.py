"""Losses that are sums over rows: a first step of several microbatches tells of them once, and of no mean."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.loss.sum_of_rows import sums_of_rows
from tests.support.kept_messages import KeptMessages
from tests.support.run_ranks import run_ranks

ROWS, POSITIONS, WIDTH, COUNT = 4, 5, 8, 4

torch.manual_seed(0)
LINEAR = nn.Linear(WIDTH, WIDTH)
X, XS = torch.randn(ROWS, WIDTH), torch.randn(ROWS, POSITIONS, WIDTH)
Y, YS = torch.randint(WIDTH, (ROWS,)), torch.randint(WIDTH, (ROWS, POSITIONS))
MASK = torch.rand(ROWS, POSITIONS) > 0.3


def rows() -> torch.Tensor:
    output: torch.Tensor = LINEAR(X)
    return output


def tokens() -> torch.Tensor:
    output: torch.Tensor = LINEAR(XS)
    return output


def of_tokens() -> torch.Tensor:
    return F.cross_entropy(tokens().transpose(1, 2), YS, reduction="none")


def squares() -> torch.Tensor:
    return (rows() - X) ** 2


def divergence() -> torch.Tensor:
    return -0.5 * (1 + rows() - rows().pow(2) - rows().exp())


def shares() -> torch.Tensor:
    return tokens().softmax(-1).mean((0, 1))


SUMS: dict[str, Callable[[], torch.Tensor]] = {
    "cross_entropy": lambda: F.cross_entropy(rows(), Y, reduction="sum"),
    "mse_loss": lambda: F.mse_loss(rows(), X, reduction="sum"),
    "a vae": lambda: F.binary_cross_entropy(rows().sigmoid(), X.sigmoid(), reduction="sum") + divergence().sum(),
    "squares": lambda: squares().sum(),
    "masked": lambda: (of_tokens() * MASK).sum(),
    "a tenth": lambda: F.mse_loss(rows(), X) + 0.1 * F.mse_loss(rows(), X, reduction="sum"),
    "stacked": lambda: torch.stack([F.mse_loss(rows(), X), F.mse_loss(rows(), X, reduction="sum")]).sum(),
}
MEANS: dict[str, Callable[[], torch.Tensor]] = {
    "cross_entropy": lambda: F.cross_entropy(rows(), Y),
    "batchmean": lambda: F.kl_div(rows().log_softmax(1), X.softmax(1), reduction="batchmean"),
    "by rows": lambda: F.cross_entropy(rows(), Y, reduction="sum") / len(Y),
    "by a count": lambda: (of_tokens() * MASK).sum() / MASK.sum(),
    "divided before": lambda: ((of_tokens() * MASK) / MASK.sum()).sum(),
    "weights of sum 1": lambda: (squares().mean(1) * torch.rand(ROWS).softmax(0)).sum(),
    "squared penalty": lambda: F.mse_loss(rows(), X) + 1e-2 * LINEAR.weight.pow(2).sum(),
    "experts": lambda: F.mse_loss(rows(), X) + WIDTH * (torch.rand(2, WIDTH) * shares().unsqueeze(0)).sum(),
    "entropy": lambda: -(rows().softmax(1).mean(0) * (rows().softmax(1).mean(0) + 1e-6).log()).sum(),
    "stacked": lambda: torch.stack([F.mse_loss(rows(), X)] * ROWS).sum(),
    "times the microbatches": lambda: F.mse_loss(rows(), X, reduction="sum") * COUNT,
}


def test_a_sum_over_rows_is_found_and_a_mean_is_no_sum() -> None:
    for name, loss in SUMS.items():
        assert list(sums_of_rows(loss(), COUNT, ROWS)), name
    for name, loss in MEANS.items():
        assert not list(sums_of_rows(loss(), COUNT, ROWS)), name


class Layer(nn.Linear):
    """A layer."""


class WithLoss(nn.Module):
    """A model that computes its loss itself."""

    def __init__(self, criterion: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH, WIDTH) for _ in range(4))
        self.criterion = criterion

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x if y is None else self.criterion(x, y)


def summed(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, label, reduction="sum")


def divided(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, label, reduction="sum") / len(label)


# The loss in the model and by loss_fn, more arguments, and whether it is told.
RUNS: dict[str, tuple[str | None, Any, dict[str, Any], bool]] = {
    "function": (None, summed, {}, True),
    "module inside": ("sum", None, {}, True),
    "divided": (None, divided, {}, False),
    "batch": (None, summed, {"loss_over": "batch", "schedule": "gpipe"}, False),
    "zero bubble": (None, summed, {"schedule": "zb-v"}, True),
}


def told(rank: int) -> dict[str, tuple[list[str], list[str]]]:
    """For each run what a first step and later ones say."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, WIDTH, generator=generator), torch.randint(WIDTH, (8,), generator=generator)
    texts = KeptMessages().texts
    found = {}
    for name, (inside, function, more, _) in RUNS.items():
        torch.manual_seed(0)
        model = NxDPPModel(
            WithLoss(nn.CrossEntropyLoss(reduction=inside or "mean")),
            **{"num_microbatches": COUNT, "transformer_layer_cls": Layer, "loss_fn": function, **more},
            broadcast_and_average_loss=True,
        )
        texts.clear()
        inputs = {"x": x, "y" if function is None else "label": y}
        model.run_train(**inputs)
        first = [*texts]
        model.run_train(**inputs)
        later = texts[len(first) :]
        # Other shapes make a new engine.
        model.run_train(**{key: torch.cat((value, value)) for key, value in inputs.items()})
        later += texts[len(first) + len(later) :]
        kept = [text for text in first if "has a sum over its rows" in text]
        found[name] = kept, [text for text in later if "has a sum" in text]
    return found


def test_a_first_step_tells_once_of_a_sum_over_rows() -> None:
    by_rank = run_ranks(2, told)

    for name in by_rank[0]:
        first = [text for own in by_rank for text in own[name][0]]
        assert len(first) == RUNS[name][3], name
        assert not any(own[name][1] for own in by_rank), name
        if first:
            assert "NllLoss with reduction='sum'" in first[0]
            assert "1/4 of those of the whole batch" in first[0]
            assert "loss_over='batch'" in first[0]
