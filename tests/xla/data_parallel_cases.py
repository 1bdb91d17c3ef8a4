"""Cases of data parallelism that run alike on the CPU and on XLA devices: a small model, and what a run of it gives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.xla_ranks import compiled

WIDTH, TOKENS, MICROBATCHES, REPLICAS = 8, 24, 2, 2


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
    steps: int = 5
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
    """Return the batch of a step, of all replicas."""
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
    results, graphs = [], []
    is_xla = parallel_state.local_device().type == "xla"
    for number in range(case.steps):
        before = compiled() if is_xla else 0
        results.append(case.step(model, optimizer, number))
        graphs.append((compiled() if is_xla else 0) - before)
    return Outcome(first_loss, results, gradients, {name: p.detach().cpu() for name, p in named}, graphs)


def in_one_process(tied: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of one process on this rank's device that has the whole batch 100."""
    device = parallel_state.local_device()
    torch.manual_seed(0)
    module = Decoder(tied).to(device)
    if tied:
        module.head.weight = module.embed.weight
    total = 0.0
    chunks = {name: value.chunk(MICROBATCHES * REPLICAS) for name, value in batch(100).items()}
    for number in range(MICROBATCHES * REPLICAS):
        loss = module(**{name: value[number].to(device) for name, value in chunks.items()})
        (loss / (MICROBATCHES * REPLICAS)).backward()
        total += loss.item() / (MICROBATCHES * REPLICAS)
    gradients = {n: p.grad.cpu() for n, p in module.named_parameters(remove_duplicate=False) if p.grad is not None}
    return total, gradients
