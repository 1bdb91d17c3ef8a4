"""Inputs that modules may take with the sequence first are a question; its remedies train as in one process."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.microbatches.sequence_first import check_not_sequence_first
from tests.support.run_ranks import run_ranks

ROWS, TOKENS, WIDTH, VOCABULARY = 4, 6, 8, 11


class Encoder(nn.Module):
    """Layers of (T, B, H), and what the tokens of all rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, mask: Any = None, positions: Any = None, table: Any = None) -> Tensor:
        hidden = self.embed(x)
        if positions is not None:
            hidden = hidden + self.place(positions)[:, None]
        if table is not None:
            hidden = hidden + table[:, None]
        for layer in self.layers:
            hidden = layer(hidden, mask)
        logits: Tensor = self.head(hidden)
        return logits


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, hidden: Tensor, state: Tensor) -> Tensor:
        result: Tensor = hidden + self.gru(hidden, state[None].contiguous())[0]
        return result


class Recurrents(nn.Module):
    """Layers of (B, T, H) from states (layers, B, H)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Recurrent() for _ in range(4))

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        hidden = self.embed(x)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, states[number])
        logits: Tensor = self.head(hidden)
        return logits


def of_tokens(output: Tensor, target: Tensor, weights: Any = None) -> Tensor:
    losses = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
    return (losses if weights is None else losses * weights[:, None]).mean()


def batch_of(case: str) -> dict[str, Tensor]:
    tokens = torch.arange(TOKENS * ROWS).view(TOKENS, ROWS) % VOCABULARY
    batch = {"x": tokens, "target": tokens.roll(-1, 0)}
    if case == "states":
        return {name: each.T.contiguous() for name, each in batch.items()} | {"states": torch.randn(4, ROWS, WIDTH)}
    more = {
        "mask": nn.Transformer.generate_square_subsequent_mask(TOKENS),
        "positions": torch.arange(TOKENS),
        "table": torch.randn(TOKENS, WIDTH),
        "weights": torch.rand(TOKENS),
    }
    return batch | {name: more[name] for name in case.split()}


def train(case: str) -> str:
    torch.manual_seed(0)
    batch = batch_of(case)
    kind, layer = (Recurrents, Recurrent) if case == "states" else (Encoder, nn.TransformerEncoderLayer)
    whole = kind()
    common: dict[str, Any] = {
        "transformer_layer_cls": layer,
        "num_microbatches": 2,
        "loss_fn": of_tokens,
        "broadcast_and_average_loss": True,
    }
    with pytest.raises(ValueError, match="Say which") as asked:
        NxDPPModel(copy.deepcopy(whole), **common).run_train(**batch)
    remedy = re.search(r"NxDPPModel\(\.\.\., (.*?)\) splits", str(asked.value))
    assert remedy is not None
    model = NxDPPModel(copy.deepcopy(whole), **common, **eval(f"dict({remedy[1]})"))
    for _ in range(2):
        model.zero_grad()
        loss = model.run_train(**batch)
    expected = of_tokens(
        whole(**{name: each for name, each in batch.items() if name not in ("target", "weights")}),
        **{name: each for name, each in batch.items() if name in ("target", "weights")},
    )
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    own = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, own[name].grad)
    return remedy[1]


REMEDIES = {
    "mask positions table weights": "batch_dimension=1, shared_inputs=['mask', 'positions', 'table', 'weights']",
    "states": "batch_dimension={'states': 1}",
}


def train_all(rank: int) -> dict[str, str]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    common: dict[str, Any] = {"transformer_layer_cls": nn.TransformerEncoderLayer, "loss_fn": of_tokens}
    # The model transposes itself; and one microbatch is the batch.
    answers: list[dict[str, Any]] = [{"num_microbatches": 2, "batch_dimension": 0}, {"num_microbatches": 1}]
    for answer in answers:
        NxDPPModel(Encoder(), **common, **answer).run_train(**batch_of(""))
    return {case: train(case) for case in REMEDIES}


@pytest.mark.cpu_only("torch wants one kernel of a GRU cell, which the fake accelerator does not have")
def test_the_remedy_of_the_question_trains_as_in_one_process() -> None:
    assert run_ranks(2, train_all) == [REMEDIES] * 2


def tokens(*shape: int) -> Tensor:
    return torch.ones(*shape).long()


X = tokens(8, 12)
ASKED: dict[str, dict[str, Tensor]] = {
    "tokens": {"x": X, "target": X},
    "rows as tokens": {"x": tokens(4, 4), "labels": tokens(4)},
    "positions": {"x": X, "target": X, "positions": tokens(8)},
    "weights of the loss": {"x": X, "target": X, "weights": torch.ones(8)},
    "a mask": {"x": X, "target": X, "mask": torch.ones(8, 8)},
    "a table of tokens": {"x": X, "target": X, "table": torch.ones(8, 3)},
    "a table beside features": {"x": torch.ones(8, 12, 3), "table": torch.ones(8, 3)},
    "one row": {"x": tokens(8, 1), "target": tokens(8)},
    "one sequence": {"x": torch.ones(8, 12), "target": torch.ones(8)},
}
CLEAR: dict[str, dict[str, Tensor]] = {
    "labels": {"x": torch.ones(8, 12, 3), "labels": tokens(8)},
    "numbers to predict": {"x": X, "y": torch.ones(8, 1)},
    "labels beside lengths": {"x": X, "positions": tokens(8), "labels": tokens(8)},
    "images and texts": {"x": X, "table": torch.ones(8, 3, 5, 5)},
    "other tokens": {"x": X, "target": tokens(8, 9)},
}


def test_what_may_be_of_all_rows_is_no_evidence() -> None:
    for name, inputs in ASKED.items():
        shown = set[str]()
        with pytest.raises(ValueError, match="fit two readings"):
            check_not_sequence_first(Encoder(), inputs, 4, shown)
        assert not shown, name
        check_not_sequence_first(Encoder(), inputs, 1, shown)
        check_not_sequence_first(Recurrents(), inputs, 4, shown)
    with pytest.raises(ValueError, match=r"One sequence \(T, H\) has no rows: .*num_microbatches=1"):
        check_not_sequence_first(Encoder(), ASKED["one sequence"], 4, set())


def test_sizes_and_labels_that_tell_the_rows_are_no_question() -> None:
    for inputs in CLEAR.values():
        check_not_sequence_first(Encoder(), inputs, 4, set())
