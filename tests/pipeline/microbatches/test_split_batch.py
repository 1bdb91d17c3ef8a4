"""``split_inputs_fn``: microbatches of inputs whose first dimension is not the batch."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.microbatches.split_batch import split_batch
from tests.support.run_ranks import run_ranks

CPU = torch.device("cpu")


class Packed(nn.Module):
    """Sequences of a batch in one long row (tokens, width), with the sequence of each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, sequence: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        sums = torch.zeros_like(target).index_add(0, sequence, hidden.sum(1))
        return (sums - target).pow(2).mean()


def by_sequences(inputs: dict[str, Any], microbatches: int) -> list[dict[str, Any]]:
    rows = len(inputs["target"]) // microbatches
    parts = []
    for number in range(microbatches):
        first = number * rows
        mine = (inputs["sequence"] >= first) & (inputs["sequence"] < first + rows)
        part = {"x": inputs["x"][mine], "sequence": inputs["sequence"][mine] - first}
        parts.append(part | {"target": inputs["target"][first : first + rows]})
    return parts


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "x": torch.randn(12, 4),
        "sequence": torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]),
        "target": torch.randn(4),
    }


class Masked(nn.Module):
    """Tokens (B, T) whose states are mixed by a mask (T, T), with a weight (T,) of their losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        hidden = torch.softmax(hidden @ hidden.transpose(1, 2) + mask, -1) @ hidden
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        loss: torch.Tensor = (hidden.pow(2).mean(-1) * weight).mean()
        return loss


def masked_batch() -> dict[str, torch.Tensor]:
    """A batch of 4 rows of 4 tokens, of which each is a microbatch."""
    torch.manual_seed(1)
    return {"ids": torch.randint(0, 8, (4, 4)), "mask": torch.randn(4, 4), "weight": torch.rand(4)}


def _train_masked() -> tuple[str, list[float]]:
    """Return the question for inputs that may be shared, and the losses with each answer."""
    with pytest.raises(ValueError, match="may have a part for each row") as caught:
        NxDPPModel(Masked(), "Linear", num_microbatches=4).run_train(**masked_batch())
    losses = []
    for shared in (["mask", "weight"], []):
        model = NxDPPModel(
            Masked(), "Linear", num_microbatches=4, broadcast_and_average_loss=True, shared_inputs=shared
        )
        for _ in range(2):
            loss = model.run_train(**masked_batch())
            losses.append(loss.item())
    return str(caught.value), losses


def _train(rank: int) -> tuple[float, dict[str, Any], tuple[str, list[float]]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    masked = _train_masked()
    model = NxDPPModel(
        Packed(), "Linear", num_microbatches=2, split_inputs_fn=by_sequences, broadcast_and_average_loss=True
    )
    loss = model.run_train(**batch())
    assert isinstance(loss, torch.Tensor)
    return loss.item(), {name: p.grad for name, p in model.local_named_parameters()}, masked


def test_microbatches_of_a_function_and_with_shared_inputs_are_exact() -> None:
    whole = Packed()
    losses = []
    for part in by_sequences(batch(), 2):
        loss = whole(**part)
        (loss / 2).backward()
        losses.append(loss.detach())

    results = run_ranks(2, _train)

    assert results[0][0] == torch.stack(losses).mean().item()
    gradients = results[0][1] | results[1][1]
    assert gradients.keys() == dict(whole.named_parameters()).keys()
    assert all(torch.equal(gradients[name], p.grad) for name, p in whole.named_parameters() if p.grad is not None)
    # One microbatch is one row of 4 tokens.
    rows, masked, given = masked_batch()["ids"].chunk(4), Masked(), masked_batch()
    shared = torch.stack([masked(row, given["mask"], given["weight"]) for row in rows]).mean().item()
    parts = zip(rows, given["mask"].chunk(4), given["weight"].chunk(4), strict=True)
    split = torch.stack([masked(*part) for part in parts]).mean().item()
    for *_, (question, losses) in results:
        assert "4 rows of 4 tokens, so that mask, weight may" in question
        assert "shared_inputs=['mask', 'weight']) gives them whole to each of the 4 microbatches" in question
        assert losses == [shared] * 2 + [split] * 2
    assert shared != split


def test_inputs_of_other_first_dimensions_name_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"disagree on dimension 0.*split_inputs_fn"):
        split_batch(Packed(), batch(), 2, None, CPU)


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (lambda inputs, number: inputs, TypeError, "list of dicts"),
        (lambda inputs, number: [inputs], ValueError, "returned 1 microbatch; num_microbatches is 2"),
        (lambda inputs, number: [{"x": object()}] * 2, TypeError, "input x is a object"),
    ],
)
def test_other_results_of_the_function_are_refused(function: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        split_batch(Packed(), batch(), 2, function, CPU)


def test_shared_inputs_that_cannot_be_are_refused() -> None:
    def check(**settings: Any) -> None:
        PipelineConfig(Packed(), "Linear", **settings).check()

    check(shared_inputs=["sequence", "x['inner']"])
    with pytest.raises(ValueError, match=r"shared_inputs: Packed.forward takes no \['sequences'\]"):
        check(shared_inputs=["sequences"])
    with pytest.raises(ValueError, match="split_inputs_fn and shared_inputs exclude each other"):
        check(shared_inputs=["sequence"], split_inputs_fn=by_sequences)
    with pytest.raises(TypeError, match=r"shared_inputs=\['sequence'\]"):
        check(shared_inputs="sequence")
    with pytest.raises(TypeError, match="split_inputs_fn='rows' must be a function"):
        check(split_inputs_fn="rows")
