"""State of layers and hooks of gradients that act once a microbatch: a first step tells of them."""

from typing import Any

import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.kept_messages import KeptMessages
from tests.support.run_ranks import run_ranks

ROWS, WIDTH, LIMIT = 8, 8, 1e-3


class Layer(nn.Module):
    """A layer that keeps state in the way of its ``kind``."""

    state: torch.Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.kind = kind
        self.is_filled = False
        if kind == "spectral_norm":
            self.linear = nn.utils.spectral_norm(self.linear)
        if kind == "batch norm":
            self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.kind == "batch norm":
            x = self.norm(x)
        if self.training and self.kind == "average":
            self.state.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        if self.training and self.kind == "assigned":
            self.state = self.state + 1.0
        if self.kind == "table" and not self.is_filled:
            self.is_filled = True
            self.state.copy_(torch.arange(WIDTH))
        output: torch.Tensor = x + self.state.clone()
        return output


TOLD = {
    "spectral_norm": "weight_u of 0.linear (Linear)",
    "average": "state of 0 (Layer)",
    "assigned": "state of 0 (Layer)",
}
UNTOLD = ["none", "table", "batch norm"]


def means(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


def build(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(kind) for _ in range(4)])


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(ROWS, WIDTH, generator=generator), torch.randint(WIDTH, (ROWS,), generator=generator)
    return {"input": x, "target": target}


def wrap(module: nn.Module, **arguments: Any) -> Any:
    common = {"num_microbatches": 4, "transformer_layer_cls": Layer, "loss_fn": means}
    return NxDPPModel(module, broadcast_and_average_loss=True, **{**common, **arguments})


def keep() -> KeptMessages:
    """Keep what the steps say of each call."""
    return KeptMessages("with each call", "of its gradient")


def states() -> dict[str, list[str]]:
    """The messages of the steps of each kind; those of one microbatch have none."""
    kept, said = keep(), {}
    for kind in (*TOLD, *UNTOLD):
        kept.texts.clear()
        model = wrap(build(kind))
        model.run_eval(**inputs())
        assert not kept.texts, kind
        model.run_train(**inputs())
        model.run_train(**inputs())
        model.run_train(**{name: torch.cat((value, value)) for name, value in inputs().items()})
        said[kind] = [*kept.texts]
        kept.texts.clear()
        wrap(build(kind), num_microbatches=1).run_train(**inputs())
        assert not kept.texts, kind
    return said


def clamped(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-LIMIT, LIMIT)


def hooks() -> tuple[list[str], list[str]]:
    """The messages of steps with hooks of several microbatches, and of one."""
    kept = keep()
    model = wrap(build("none"))
    for each in model.parameters():
        each.register_hook(clamped)
    model.run_train(**inputs())
    model.run_train(**inputs())
    told = [*kept.texts]
    kept.texts.clear()
    one = wrap(build("none"), num_microbatches=1)
    for each in one.parameters():
        each.register_hook(clamped)
    one.run_train(**inputs())
    return told, [*kept.texts]


def both(rank: int) -> tuple[Any, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    return states(), hooks()


def test_state_and_hooks_that_act_with_each_call_are_told_of_once() -> None:
    by_rank = run_ranks(2, both)
    for kind in (*TOLD, *UNTOLD):
        texts = [said[kind] for said, _ in by_rank]
        assert [len(own) for own in texts] == [kind in TOLD] * 2, (kind, texts)
        if kind in TOLD:
            assert TOLD[kind] in texts[0][0]
            assert "one of 4 microbatches" in texts[0][0]
    for _, (told, later) in by_rank:
        assert len(told) == 1
        assert "4 parameters have a hook" in told[0]
        assert "one of 4 microbatches" in told[0]
        assert not later
