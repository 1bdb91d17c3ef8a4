"""``GradScaler`` over ranks: the numbers of torch's in one process, and one decision about a step on all ranks."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import GradScaler, NxDPPModel, parallel_state
from nxdpp.gradients.grad_scaler import check_grad_scaler
from nxdpp.pipeline.config import PipelineConfig
from tests.pipeline.runtime.scheduled_models import Chain, make, rows
from tests.support.models import gradient_differences
from tests.support.plain_models import Block
from tests.support.run_ranks import run_ranks

MICROBATCHES = 2
SCALE = 2.0**10
# A factor of gradients that overflows those of the embedding alone.
LARGE = 1e9


class Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


class Amplifier(nn.Module):
    """Multiplies the gradients of what comes before it."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        amplified: torch.Tensor = Multiplied.apply(x, self.factor)  # type: ignore[no-untyped-call]
        return amplified


class Model(Chain):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.amplifier = Amplifier()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.amplifier(self.embedding(x))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).square().mean()  # type: ignore[no-any-return]


class Steps:
    """A wrapped model with its scaler, and the same in one process."""

    def __init__(self, **arguments: Any) -> None:
        model, self.whole = make(Model, 4), make(Model, 4)
        self.amplifiers: list[Any] = [model.amplifier, self.whole.amplifier]
        self.scaler = GradScaler(init_scale=SCALE, growth_interval=2)
        self.reference = torch.amp.GradScaler("cpu", SCALE, growth_interval=2)
        self.model = NxDPPModel(
            model,
            transformer_layer_cls=Block,
            num_microbatches=MICROBATCHES,
            grad_scaler=self.scaler,
            **arguments,
        )
        self.model.move_model_to_device()
        self.optimizers = [
            torch.optim.AdamW(each.parameters(), lr=0.01) for each in (self.model.local_module, self.whole)
        ]

    def run(self, x: torch.Tensor, factor: float = 1.0) -> bool:
        """Run a step of both; return whether this rank has an overflow before the step."""
        for amplifier in self.amplifiers:
            amplifier.factor = factor
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.float16):
            self.model.run_train(x=x)
            losses = [self.whole(part) for part in x.chunk(MICROBATCHES)]
        for loss in losses:
            self.reference.scale(loss / MICROBATCHES).backward()
        differences = gradient_differences(self.model, self.whole)
        finite = [p.grad.isfinite().all() for _, p in self.model.local_named_parameters() if p.grad is not None]
        assert not differences or not all(finite), differences
        for scaler, optimizer in zip((self.scaler, self.reference), self.optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
        assert self.scaler.get_scale() == self.reference.get_scale()
        values = dict(self.whole.named_parameters())
        for name, parameter in self.model.local_named_parameters():
            assert torch.equal(parameter, values[name]), name
        return not all(finite)


def train(rank: int) -> tuple[list[bool], list[float]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    steps = Steps(check_against_module="first")
    overflows, scales = [], []
    for step in range(5):
        overflows.append(steps.run(rows(4, seed=step), LARGE if step == 2 else 1.0))
        scales.append(steps.scaler.get_scale())
    # An overflow of one replica, and an optimizer without gradients beside it.
    before = [parameter.detach().clone() for parameter in steps.model.local_module.parameters()]
    steps.optimizers[0].zero_grad()
    steps.amplifiers[0].factor = LARGE if parallel_state.get_data_parallel_rank() else 1.0
    with torch.autocast(torch.empty(0).device.type, torch.float16):
        steps.model.run_train(x=rows(4))
    without = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    for optimizer in (steps.optimizers[0], without):
        steps.scaler.step(optimizer)
    steps.scaler.update()
    assert all(map(torch.equal, before, steps.model.local_module.parameters()))
    scales.append(steps.scaler.get_scale())
    return overflows, scales


def test_an_overflow_on_one_stage_skips_the_step_on_all_ranks() -> None:
    results = run_ranks(4, train)
    stages = [[False, False, True, False, False], [False] * 5]
    assert [overflows for overflows, _ in results] in ([*stages, *stages], [stages[0]] * 2 + [stages[1]] * 2)
    assert {tuple(scales) for _, scales in results} == {(SCALE, 2 * SCALE, SCALE, SCALE, 2 * SCALE, SCALE)}


def different_scales(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    steps = Steps()
    steps.run(rows(4))
    steps.scaler.update(SCALE / (1 + rank))
    with torch.autocast(torch.empty(0).device.type, torch.float16):
        steps.model.run_train(x=rows(4))
    steps.scaler.step(steps.optimizers[0])


def test_different_scales_are_an_error_on_all_ranks() -> None:
    with pytest.raises(AssertionError) as error:
        run_ranks(2, different_scales)
    told = r"RuntimeError: the ranks scale the loss by different numbers, 512.0 to 1024.0"
    assert re.search(told, str(error.value))


def another_order(rank: int) -> None:
    """Two optimizers in another order on one stage."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    scaler = GradScaler(init_scale=4.0)
    scaler.begin_step(torch.empty(0).device)
    parameters = [nn.Parameter(torch.zeros(2 + place)) for place in range(2)]
    both = [torch.optim.SGD([each], lr=rate) for each, rate in zip(parameters, (0.1, 0.2), strict=True)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for optimizer in both:
        scaler.step(optimizer)
    scaler.update()
    # Another number of parameters on another stage is no difference.
    if rank:
        both[0].add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.3})
    scaler.step(both[0])
    scaler.step(both[1])
    scaler.update()
    print("now in another order", flush=True)
    for optimizer in reversed(both) if rank else both:
        scaler.step(optimizer)


def test_optimizers_in_another_order_are_an_error() -> None:
    with pytest.raises(AssertionError) as error:
        run_ranks(2, another_order)
    assert "the ranks step their optimizers in different orders" in str(error.value)
    # Earlier steps raised nothing.
    assert "now in another order" in str(error.value)


def step_by_torch(rank: int) -> None:
    """torch's scaler of a pipelined model is refused; one that is off, and one of a model of its own, step."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model, other = (
        NxDPPModel(make(Chain, 4), Block, num_microbatches=2, broadcast_and_average_loss=True),
        make(Chain, 4),
    )
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model.run_train(x=rows(4)))
    told = r"divided the gradients of SGD by its scale of 65536.*give it to NxDPPModel\(\.\.\., grad_scaler=scaler\)"
    with pytest.raises(RuntimeError, match=rf"(?s){told}"):
        scaler.step(optimizer)
    model.run_train(x=rows(4))
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    other(rows(4)).backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(torch.optim.SGD(other.parameters(), lr=0.1))


def test_steps_of_a_scaler_of_torch_are_refused() -> None:
    run_ranks(2, step_by_torch)


def test_a_scaler_of_torch_is_refused() -> None:
    with pytest.raises(TypeError, match=r"nxdpp\.GradScaler takes the same arguments"):
        PipelineConfig(nn.Linear(2, 2), grad_scaler=torch.amp.GradScaler("cpu")).check()  # type: ignore[arg-type]
    check_grad_scaler(GradScaler("cpu"))
    check_grad_scaler(None)


def test_calls_of_a_script_for_one_process_are_refused() -> None:
    scaler = GradScaler("cpu")
    loss = torch.ones((), requires_grad=True)
    for outputs in (None, loss.detach()):
        with pytest.raises(RuntimeError, match=r"leave scaler\.scale\(loss\)\.backward\(\) out"):
            scaler.scale(outputs)
    optimizer = torch.optim.SGD([loss], lr=0.1)
    with pytest.raises(RuntimeError, match=r"give it to the model, NxDPPModel\(\.\.\., grad_scaler=scaler\)"):
        scaler.step(optimizer)
    with pytest.raises(ValueError, match=r"is for 'cpu', and the stages of this rank are on 'meta'"):
        scaler.begin_step(torch.device("meta"))
    scaler.begin_step(torch.empty(0).device)
    assert scaler.scale(loss).item() == 2.0**16
