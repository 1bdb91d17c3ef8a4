"""A ``generate`` that the model's class has written itself gives the tokens of one process, on all ranks."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nxdpp import NxDPPModel, parallel_state
from tests.support.run_ranks import run_ranks

VOCABULARY, CONTEXT = 17, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(16, 16), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        before = x.cumsum(1) / torch.arange(1, x.size(1) + 1).view(-1, 1)
        return x + self.dropout(F.gelu(self.linear(before)))  # type: ignore[no-any-return]


class SmallGPT(nn.Module):
    """As nanoGPT: ``forward(idx, targets)`` returns logits and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.h = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.embedding(idx)
        for block in self.h:
            x = block(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -CONTEXT:])
            logits = logits[:, -1, :] / temperature
            if top_k is not None:
                logits[logits < torch.topk(logits, top_k)[0][:, [-1]]] = -float("inf")
            idx = torch.cat((idx, torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)), dim=1)
        return idx


class CallsItsHead(SmallGPT):
    def generate(self, idx: Tensor, max_new_tokens: int) -> Any:  # type: ignore[override]
        return self.head(torch.ones(1, 16)), self.embedding(idx)


class GivesTooMuch(SmallGPT):
    def generate(self, idx: Tensor, max_new_tokens: int) -> Any:  # type: ignore[override]
        return self(idx, None, max_new_tokens)


class GivesTargets(SmallGPT):
    def generate(self, idx: Tensor, max_new_tokens: int) -> Any:  # type: ignore[override]
        return self(idx, idx)[0]


def wrapped(model: nn.Module) -> Any:
    return NxDPPModel(model, Block, num_microbatches=2, output_loss_value_spec=(False, True))


def generate(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    whole = SmallGPT()
    model = wrapped(copy.deepcopy(whole))
    rows = torch.arange(12).view(4, 3)
    model.run_train(idx=rows, targets=rows)
    found: dict[str, Any] = {"dropout": error_of(model, rows, 2)}
    model.eval()
    whole.eval()
    found["parts"] = error_of(model, rows, 2, num_microbatches=2)
    for name, prompt, arguments in (
        ("one row", rows[:1], {"top_k": 3}),
        ("rows", rows, {"temperature": 0.7}),
    ):
        both = []
        for each in (model, whole):
            torch.manual_seed(5)
            both.append(each.generate(prompt, 9, **arguments))
        found[name] = both
    found["targets"] = error_of(wrapped(GivesTargets()).eval(), rows, 2)
    found["too much"] = error_of(wrapped(GivesTooMuch()).eval(), rows, 2)
    found["module"] = error_of(wrapped(CallsItsHead()).eval(), rows, 2)
    return found


def error_of(model: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises((ValueError, RuntimeError, TypeError)) as caught:
        model.generate(*arguments, **named)
    return str(caught.value)


def test_tokens_of_one_process() -> None:
    for rank in run_ranks(2, generate):
        for name in ("one row", "rows"):
            ours, theirs = rank[name]
            assert torch.equal(ours, theirs), name
        assert "leave out num_microbatches=2" in rank["parts"]
        assert "in training mode" in rank["dropout"]
        assert "without labels" in rank["targets"]
        assert "too many positional arguments" in rank["too much"]
        assert "is called on a rank that has no values of it" in rank["module"]
