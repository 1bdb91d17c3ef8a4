"""Modules with batch norms, parametrizations, dropout and buffers, in a loop and in two stages of one rank."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from nxdpp.nnscaler import ComputeConfig, ParallelModule
from tests.doors.nnscaler.own_folders import parallelize
from tests.doors.nnscaler.trained_modules import WIDTH, sample

SAMPLES = [sample(seed, rows=4) for seed in range(2)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last: nn.Module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.linear(x).tanh())
        return result


class Blocks(nn.Module):
    """Takes a dict; returns the loss, and a dict with a tensor and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 2.0), persistent=False)

    def forward(self, data: dict[str, torch.Tensor]) -> Any:
        x = data["data"] * self.get_buffer("scale")
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.head(x), data["target"]), {"hidden": x, "number": 3}


class WithBatchNorms(Blocks):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.last = nn.BatchNorm1d(WIDTH)


class Parametrized(Blocks):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.utils.parametrizations.weight_norm(block.get_submodule("linear"))


class WithDropout(Blocks):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.last = nn.Dropout(0.5)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


def seeded(call: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    return call()


@pytest.mark.parametrize(("stages", "gives_class"), [(1, False), (2, True)])
@pytest.mark.parametrize("kind", [WithBatchNorms, Parametrized, WithDropout])
def test_it_trains_as_one_process(kind: type[Blocks], gives_class: bool, stages: int) -> None:
    pipeline = {"pipeline_nmicros": 2, "pipeline_nstages": 2, "pipeline_scheduler": "1f1b_interleaved"}
    settings = ComputeConfig(1, 1, use_end2end=True, pas_config=pipeline if stages == 2 else {})
    whole: Blocks = seeded(kind)
    given: Any = kind if gives_class else seeded(kind)
    made = seeded(lambda: parallelize(given, {"data": SAMPLES[0]}, "hybrid" if stages == 2 else "dp", settings))
    model = made() if gives_class else made
    assert isinstance(model, ParallelModule)

    ours = seeded(lambda: model.train_step(SAMPLES))
    theirs = seeded(lambda: [whole(each) for each in SAMPLES])
    for loss, _ in theirs:
        loss.backward()

    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own[0], other[0])
        assert torch.equal(own[1]["hidden"], other[1]["hidden"])
        assert own[1]["number"] == 3
    gradients = {name: each.grad for name, each in whole.named_parameters(remove_duplicate=False)}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=0)
    buffers = dict(whole.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name])
    assert set(whole.state_dict()) == {name for name in model.state_dict() if name != "nxdpp_extra_state"}
    if not gives_class:
        assert all(torch.equal(value, seeded(kind).state_dict()[name]) for name, value in given.state_dict().items())
