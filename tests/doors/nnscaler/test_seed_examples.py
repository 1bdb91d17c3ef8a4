"""The three examples of nnScaler's page on ``parallelize``, with ``nxdpp.nnscaler`` in the place of ``nnscaler``.

The page leaves out models and data, and calls the third example's module by another name.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import nxdpp.nnscaler as nnscaler
from nxdpp import parallel_state
from nxdpp.nnscaler import ComputeConfig
from tests.doors.nnscaler.own_folders import parallelize
from tests.support.run_ranks import run_ranks

TOKENS, WIDTH, RANKS = 16, 8, 4


class LLM(nn.Module):
    """The module of example 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.hidden = nn.Linear(WIDTH, 4 * WIDTH)
        self.head = nn.Linear(4 * WIDTH, TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (B, TOKENS) of tokens (B)."""
        logits: torch.Tensor = self.head(self.hidden(self.embedding(x)).relu())
        return logits


class HeavyModule(nn.Module):
    """The module of example 2 that is made parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden values (B, WIDTH)."""
        hidden: torch.Tensor = x + self.down(self.up(x).relu())
        return hidden


class PartlyParallelLLM(nn.Module):
    """The module of example 2; without ``compute_config`` the same in one process."""

    def __init__(self, policy: str = "", compute_config: ComputeConfig | None = None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.heavy_module: Any = HeavyModule()
        self.head = nn.Linear(WIDTH, TOKENS)
        if compute_config is not None:
            heavy_module_sample_input = torch.randn(2, WIDTH)
            self.heavy_module = parallelize(
                self.heavy_module,
                {"x": heavy_module_sample_input},
                policy,
                compute_config,
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (B, TOKENS) of tokens (B)."""
        x = self.embedding(x)
        x = self.heavy_module(x)
        logits: torch.Tensor = self.head(x)
        return logits


class End2EndMLP(nn.Module):
    """The module of example 3."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.layers = torch.nn.ModuleList([])
        for _ in range(8):
            self.layers.append(nn.Linear(16, 16, bias=False))
        self.loss_fn = nn.BCELoss()

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss."""
        x = data["data"]
        for layer in self.layers:
            x = layer(x)
        x = torch.sigmoid(x)
        loss: torch.Tensor = self.loss_fn(x, data["target"])
        return loss


class Pairs(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Tokens and the next ones."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(index % TOKENS), torch.tensor((5 * index + 1) % TOKENS)


def create_distributed_sampler(dataset: Any, compute_config: ComputeConfig, rank: int) -> DistributedSampler[Any]:
    return torch.utils.data.DistributedSampler(
        dataset=dataset,
        num_replicas=compute_config.ranks // compute_config.plan_ngpus,
        rank=rank // compute_config.plan_ngpus,
        shuffle=False,
    )


def batches(compute_config: ComputeConfig, rank: int) -> DataLoader[Any]:
    sampler = create_distributed_sampler(Pairs(), compute_config, rank)
    return DataLoader(Pairs(), batch_size=2, sampler=sampler)


def infer(model: Any, x: torch.Tensor) -> Any:
    model.eval()
    with torch.inference_mode():
        return model(x)


def train(model: Any, data: Iterable[Any]) -> None:
    loss_fn = nn.CrossEntropyLoss()
    optimizer = nnscaler.build_optimizer(model, torch.optim.Adam, lr=0.05)
    for x, y in data:
        model.train()
        y_pred = model(x)
        loss = loss_fn(y_pred, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_whole(model: nn.Module, compute_config: ComputeConfig) -> nn.Module:
    """Train ``model`` in one process, by the sum of the losses of all units."""
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    units = [batches(compute_config, unit * compute_config.plan_ngpus) for unit in range(compute_config.units)]
    for each in zip(*units, strict=True):
        for x, y in each:
            loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def one_dict(values: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"data": values[0], "target": values[1]}


def test_the_three_examples_train_as_one_process() -> None:
    run_ranks(RANKS, _examples)


def _examples(rank: int) -> None:
    for example, policy, plan_ngpus, use_zero in ((_example_1, "tp", 2, True), (_example_2, "tp", 2, False)):
        example(rank, policy, ComputeConfig(plan_ngpus=plan_ngpus, runtime_ngpus=RANKS, use_zero=use_zero))
        parallel_state.destroy_model_parallel()
    _example_3(rank)
    parallel_state.destroy_model_parallel()
    assert not dist.is_initialized()


def _example_1(rank: int, policy: str, compute_config: ComputeConfig) -> None:
    llm_sample_input = torch.zeros(2, dtype=torch.int64)
    ParallelizedLLM = parallelize(LLM, {"x": llm_sample_input}, policy, compute_config)
    assert isinstance(ParallelizedLLM, type)
    model = ParallelizedLLM()
    train(model, batches(compute_config, rank))
    x = torch.arange(TOKENS)
    _assert_close(infer(model, x), trained_whole(LLM(), compute_config)(x))


def _example_2(rank: int, policy: str, compute_config: ComputeConfig) -> None:
    model = PartlyParallelLLM(policy, compute_config)
    whole = PartlyParallelLLM()
    train(model, batches(compute_config, rank))
    x = torch.arange(TOKENS)
    _assert_close(infer(model, x), trained_whole(whole, compute_config)(x))


def _example_3(rank: int) -> None:
    compute_config = ComputeConfig(
        plan_ngpus=2,
        runtime_ngpus=RANKS,
        use_zero=True,
        use_end2end=True,
        pas_config={"pipeline_nmicros": 3},
    )
    values = torch.rand(4, 2, 3, 2, 2, 16, generator=torch.Generator().manual_seed(0))
    data = [[one_dict(each) for each in step[rank // 2]] for step in values]
    llm_sample_input = data[0][0]
    ParallelizedPipelinedLLM = parallelize(End2EndMLP, {"data": llm_sample_input}, "pp", compute_config)
    assert isinstance(ParallelizedPipelinedLLM, type)
    model = ParallelizedPipelinedLLM().to(torch.empty(0).device)

    def infer(model: Any, data: Any) -> Any:
        model.eval()
        with torch.inference_mode():
            return model.infer_step(data)

    def train(model: Any, data: Any) -> list[Any]:
        optimizer = nnscaler.build_optimizer(model, torch.optim.Adam, lr=0.05)
        found = []
        for x in data:
            model.train()
            losses = model.train_step(x)
            optimizer.step()
            optimizer.zero_grad()
            found.append(losses)
        return found

    whole = End2EndMLP()
    optimizer = torch.optim.Adam(whole.parameters(), lr=0.05)
    expected = []
    for step in values:
        losses = [[whole(one_dict(each)) for each in unit] for unit in step]
        torch.stack(losses[0] + losses[1]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(losses[rank // 2])
    _assert_close(train(model, data), expected)
    _assert_close(infer(model, data[0]), [whole(each) for each in data[0]])


def _assert_close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
