"""Data parallelism over XLA ranks, two replicas of two stages: averages, ZeRO-1, clipping, scaling and sums by hand.

The numbers are those of the CPU and of one process, and no graph is compiled after the second step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import GradScaler, NxDPPModel, parallel_state
from nxdpp.doors.nxd.neuron_zero1 import NeuronZero1Optimizer
from nxdpp.gradients import average, buckets
from nxdpp.gradients.average import bucket_allreduce_gradients
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from tests.support.run_ranks import run_ranks
from tests.support.xla_ranks import compilations, run_xla_ranks

WIDTH, TOKENS, MICROBATCHES, REPLICAS, STEPS = 8, 24, 2, 2, 4


class Block(nn.Module):
    """The layer class to cut after."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.scale * torch.tanh(self.linear(hidden))


class Decoder(nn.Module):
    """An embedding, blocks and a head, which shares the weight of the embedding with ``tied``."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten())


@dataclass
class Case:
    """One training: ``make_optimizer`` gets the named local parameters, ``step`` makes a training step."""

    tied: bool = False
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    make_optimizer: Callable[[Sequence[tuple[str, nn.Parameter]]], Any] = lambda named: torch.optim.SGD(
        [parameter for _, parameter in named], lr=0.5, momentum=0.9
    )
    step: Callable[[NxDPPModel, Any, int], Any] = lambda model, optimizer, number: plain_step(model, optimizer, number)


@dataclass
class Outcome:
    """The results of one rank, in host memory. ``graphs`` are the compilations of each step."""

    first_loss: float
    results: list[Any]
    gradients: dict[str, torch.Tensor | None]
    parameters: dict[str, torch.Tensor]
    graphs: list[int]


def batch(number: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, TOKENS, (2 * MICROBATCHES * REPLICAS, 5), generator=torch.Generator().manual_seed(number))
    return {"ids": ids, "labels": ids.roll(1, 0)}


def own_batch(number: int) -> dict[str, torch.Tensor]:
    """Return this replica's part of the batch of a step."""
    replica = parallel_state.get_data_parallel_rank()
    return {name: value.chunk(REPLICAS)[replica] for name, value in batch(number).items()}


def run_step(model: NxDPPModel, number: int) -> float:
    """Return the mean loss of a training step."""
    loss = model.run_train(**own_batch(number))
    assert isinstance(loss, torch.Tensor)
    return loss.item()


def plain_step(model: NxDPPModel, optimizer: Any, number: int) -> float:
    """Return the mean loss of a training step, and make the optimizer's step."""
    loss = run_step(model, number)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def run(case: Case) -> Outcome:
    """Run a case on this rank's device. The first step's gradients are those of ``run_train`` alone."""
    torch.manual_seed(0)
    module = Decoder(case.tied).to(case.dtype)
    settings = {"num_microbatches": MICROBATCHES, "broadcast_and_average_loss": True, **case.options}
    model = NxDPPModel(module, transformer_layer_cls=Block, **settings)
    model.move_model_to_device()
    named = list(model.local_named_parameters())
    first_loss = run_step(model, 100)
    gradients = {name: None if p.grad is None else p.grad.cpu() for name, p in named}
    model.zero_grad()
    optimizer = case.make_optimizer(named)
    results, graphs = list[Any](), list[int]()
    for number in range(STEPS):
        with compilations(graphs):
            results.append(case.step(model, optimizer, number))
    return Outcome(first_loss, results, gradients, {name: p.detach().cpu() for name, p in named}, graphs)


def in_one_process() -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of one process on this rank's device that has the whole batch 100."""
    device = parallel_state.local_device()
    torch.manual_seed(0)
    module = Decoder(True).to(device)
    module.head.weight = module.embed.weight
    total = 0.0
    chunks = {name: value.chunk(MICROBATCHES * REPLICAS) for name, value in batch(100).items()}
    for number in range(MICROBATCHES * REPLICAS):
        loss = module(**{name: value[number].to(device) for name, value in chunks.items()})
        (loss / (MICROBATCHES * REPLICAS)).backward()
        total += loss.item() / (MICROBATCHES * REPLICAS)
    gradients = {n: p.grad.cpu() for n, p in module.named_parameters(remove_duplicate=False) if p.grad is not None}
    return total, gradients


_Named = Sequence[tuple[str, nn.Parameter]]
# AdamW divides a gradient by its size: the rounding of one near zero shows without this.
_ADAMW: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4}


def _zero1(named: _Named) -> Zero1Optimizer:
    return Zero1Optimizer(named, torch.optim.AdamW, max_norm=0.3, bucket_cap_mb=0.0005, **_ADAMW)


def _neuron_zero1(named: _Named) -> NeuronZero1Optimizer:
    return NeuronZero1Optimizer(named, torch.optim.AdamW, max_norm=0.3, higher_cc_precision=True, **_ADAMW)


def _zero1_of_sums(named: _Named) -> Zero1Optimizer:
    return Zero1Optimizer(
        named, torch.optim.AdamW, grad_clipping=False, bucket_cap_mb=0.0005, reduction="sum", **_ADAMW
    )


def _norm_and_step(model: NxDPPModel, optimizer: Any, number: int) -> tuple[float, float]:
    loss = plain_step(model, optimizer, number)
    return loss, optimizer.grad_norm.item()


def _clipped(model: NxDPPModel, optimizer: Any, number: int) -> tuple[float, float]:
    loss = run_step(model, number)
    norm = model.clip_grad_norm_(0.3)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm.item()


def _by_hand(model: NxDPPModel, optimizer: Any, number: int) -> float:
    with model.no_sync():
        loss = run_step(model, number)
    bucket_allreduce_gradients([p.grad for p in model.local_parameters() if p.grad is not None])
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _accumulated(model: NxDPPModel, optimizer: Any, number: int) -> float:
    with model.no_sync():
        run_step(model, 50 + number)
    return plain_step(model, optimizer, number)


def _uneven(model: NxDPPModel, optimizer: Any, number: int) -> float:
    """Take a gradient away on the second replica: it counts as zeros there."""
    with model.no_sync():
        loss = run_step(model, number)
    if parallel_state.get_data_parallel_rank() == 1:
        next(iter(model.local_parameters())).grad = None
    groups = parallel_state.get_data_parallel_group(), parallel_state.get_replica_control_group()
    average.average_gradients(model.local_parameters(), *groups)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _halved(flat: torch.Tensor) -> None:
    flat.mul_(0.5)


def _in_parts(model: NxDPPModel, optimizer: Any, number: int) -> tuple[float, float]:
    loss = run_step(model, number)
    optimizer.reduce_gradients([_halved], [_halved])
    optimizer.reduce_gradients()
    optimizer.scale_gradients(3.0)
    norm = optimizer.clip_gradients(0.3)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm.item()


def _small_buckets(model: NxDPPModel, optimizer: Any, number: int) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_BYTES", 100)
        return plain_step(model, optimizer, number)


CASES = {
    "interleaved, tied": Case(tied=True, options={"virtual_pipeline_size": 2}),
    "tied": Case(tied=True),
    "zero1": Case(options={"use_zero1_optimizer": True}, make_optimizer=_zero1, step=_norm_and_step),
    "neuron zero1, tied": Case(
        tied=True, options={"use_zero1_optimizer": True}, make_optimizer=_neuron_zero1, step=_norm_and_step
    ),
    "zero1, bfloat16": Case(
        dtype=torch.bfloat16,
        options={"use_zero1_optimizer": True},
        make_optimizer=_neuron_zero1,
        step=_norm_and_step,
    ),
    "zero1 in parts": Case(options={"use_zero1_optimizer": True}, make_optimizer=_zero1_of_sums, step=_in_parts),
    "clipped": Case(tied=True, step=_clipped),
    "by hand": Case(step=_by_hand),
    "accumulated": Case(tied=True, step=_accumulated),
    "uneven": Case(step=_uneven),
    "small buckets": Case(step=_small_buckets),
}


def _all(rank: int, device: str | None) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, device=device)
    return {name: run(case) for name, case in CASES.items()} | {
        "scaled": _scaled(),
        "one process": in_one_process(),
    }


def _scaled() -> list[Any]:
    """Train with a scale that overflows once; return the losses, the scales, and whether each step changed a value."""
    torch.manual_seed(0)
    scaler = GradScaler(init_scale=2.0**8, growth_interval=2)
    model = NxDPPModel(
        Decoder(False),
        transformer_layer_cls=Block,
        num_microbatches=2,
        broadcast_and_average_loss=True,
        grad_scaler=scaler,
    )
    model.move_model_to_device()
    parameters = list(model.local_parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    found = []
    for number in range(5):
        loss = model.run_train(**own_batch(number))
        assert isinstance(loss, torch.Tensor)
        if number == 2 and parallel_state.get_pipeline_model_parallel_rank() == 0:
            assert parameters[0].grad is not None
            parameters[0].grad.fill_(float("inf"))
        before = parameters[-1].detach().cpu().clone()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((loss.item(), scaler.get_scale(), torch.equal(before, parameters[-1].detach().cpu())))
    return found


@pytest.fixture(scope="module")
def on_cpu() -> list[dict[str, Any]]:
    return run_ranks(4, _all, None)


@pytest.fixture(scope="module")
def on_xla() -> list[dict[str, Any]]:
    return run_xla_ranks(4, _all, "xla", timeout=400)


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_the_cpu(name: str, on_cpu: list[dict[str, Any]], on_xla: list[dict[str, Any]]) -> None:
    distance = 3e-2 if CASES[name].dtype == torch.bfloat16 else 1e-5
    for cpu, xla in zip(on_cpu, on_xla, strict=True):
        torch.testing.assert_close(xla[name].results, cpu[name].results, rtol=0, atol=distance)
        torch.testing.assert_close(xla[name].gradients, cpu[name].gradients, rtol=0, atol=distance)
        torch.testing.assert_close(xla[name].parameters, cpu[name].parameters, rtol=0, atol=distance)
        assert xla[name].graphs[2:] == [0, 0]


def test_one_process_with_the_same_microbatches(on_xla: list[dict[str, Any]]) -> None:
    for rank in on_xla:
        loss, gradients = rank["one process"]
        torch.testing.assert_close(rank["tied"].first_loss, loss, rtol=0, atol=1e-6)
        for name, found in rank["tied"].gradients.items():
            torch.testing.assert_close(found, gradients[name], rtol=0, atol=1e-6)


def test_an_overflow_skips_one_step_on_all_ranks(on_cpu: list[dict[str, Any]], on_xla: list[dict[str, Any]]) -> None:
    for cpu, xla in zip(on_cpu, on_xla, strict=True):
        torch.testing.assert_close(xla["scaled"], cpu["scaled"], rtol=0, atol=1e-5)
        assert [unchanged for *_, unchanged in xla["scaled"]] == [False, False, True, False, False]
