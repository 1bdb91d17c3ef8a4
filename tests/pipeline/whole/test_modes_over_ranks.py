"""Modes of torch in the spine over real processes and schedules: losses and gradients of one process."""

import copy
from typing import Any

import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.run_ranks import run_ranks

WIDTH = 8
LAYERS = 8
MICROBATCHES = 4


class Layer(nn.Module):
    """A layer of (B, H)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Frozen(nn.Module):
    """The first layers run without gradients, the others and the loss in blocks of autocast."""

    def __init__(self, frozen: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)
        self.frozen = frozen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = list(self.layers)
        with torch.no_grad():
            hidden = self.embedding(x)
            for layer in layers[: self.frozen]:
                hidden = layer(hidden)
        with torch.amp.autocast(x.device.type, dtype=torch.bfloat16):
            for layer in layers[self.frozen :]:
                hidden = layer(hidden)
            with torch.amp.autocast(x.device.type, enabled=False):
                loss: torch.Tensor = self.head(hidden.float()).square().mean()
        return loss


CASES: list[dict[str, Any]] = [
    {"schedule": "1f1b"},
    {"schedule": "interleaved", "virtual_pipeline_size": 2},
    {"schedule": "zb1p"},
]


def train(rank: int) -> list[str]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    wrong = []
    for case in CASES:
        # Gradients off on a part of the first stage or of its chunk, and on a later one.
        for frozen in (1, 4):
            torch.manual_seed(0)
            model = Frozen(frozen)
            whole = copy.deepcopy(model)
            wrapped = NxDPPModel(model, transformer_layer_cls=Layer, num_microbatches=MICROBATCHES, **case)
            x = torch.randn(MICROBATCHES * 2, WIDTH, generator=torch.Generator().manual_seed(1))
            for around in (False, True):
                with torch.autocast(x.device.type, torch.bfloat16, enabled=around):
                    loss = wrapped.run_train(x=x)
                losses = []
                for part in x.chunk(MICROBATCHES):
                    with torch.autocast(x.device.type, torch.bfloat16, enabled=around):
                        losses.append(whole(part))
                    (losses[-1] / MICROBATCHES).backward()
                if wrapped.holds_last_stage:
                    assert isinstance(loss, torch.Tensor)
                    wrong += [] if torch.equal(loss, torch.stack(losses).detach().mean()) else [f"{case} {frozen} loss"]
                tested = wrapped.run_eval(x=x)
                if wrapped.holds_last_stage:
                    with torch.no_grad():
                        expected = torch.stack([whole(part) for part in x.chunk(MICROBATCHES)]).mean()
                    wrong += [] if torch.equal(tested, expected) else [f"{case} {frozen} evaluation"]
            references = dict(whole.named_parameters())
            for name, parameter in wrapped.local_named_parameters():
                ours, theirs = parameter.grad, references[name].grad
                is_same = ours is theirs if ours is None or theirs is None else torch.equal(ours, theirs)
                wrong += [] if is_same else [f"{case} {frozen} {name}"]
    return wrong


def test_a_frozen_backbone_and_blocks_of_autocast() -> None:
    assert run_ranks(2, train) == [[], []]
