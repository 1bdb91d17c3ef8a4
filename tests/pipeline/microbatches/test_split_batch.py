"""``split_inputs_fn``: microbatches of inputs whose first dimension is not the batch."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.microbatches.split_batch import split_batch
from tests.support.models import gradient_differences
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
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        hidden = torch.softmax(hidden @ hidden.transpose(1, 2) + mask, -1) @ hidden
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        loss: torch.Tensor = (hidden.pow(2).mean(-1) * weight).mean()
        return loss


@pytest.mark.usefixtures("one_rank")
def test_as_many_rows_as_tokens_are_a_question_and_each_answer_is_exact() -> None:
    """Each of 4 rows of 4 tokens is a microbatch."""
    torch.manual_seed(1)
    ids, mask, weight = torch.randint(0, 8, (4, 4)), torch.randn(4, 4), torch.rand(4)
    inputs = {"ids": ids, "mask": mask, "weight": weight}
    with pytest.raises(ValueError, match="4 rows of 4 tokens, so that mask, weight may have a part for each row"):
        NxDPPModel(Masked(), "Linear", num_microbatches=4).run_train(**inputs)
    whole = Masked()
    parts = list(zip(ids.chunk(4), mask.chunk(4), weight.chunk(4), strict=True))
    shared = torch.stack([whole(row, mask, weight) for row, *_ in parts]).mean()
    split = torch.stack([whole(*part) for part in parts]).mean()
    assert not torch.equal(shared, split)
    for names, expected in ((["mask", "weight"], shared), ([], split)):
        model = NxDPPModel(Masked(), "Linear", num_microbatches=4, shared_inputs=names)
        torch.testing.assert_close(model.run_train(**inputs), expected.detach())


def train(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = NxDPPModel(Packed(), "Linear", num_microbatches=2, split_inputs_fn=by_sequences)
    loss = model.run_train(**batch())
    whole = Packed()
    losses = []
    for part in by_sequences(batch(), 2):
        losses.append(whole(**part))
        (losses[-1] / 2).backward()
    assert loss is None or (isinstance(loss, torch.Tensor) and torch.equal(loss, torch.stack(losses).mean()))
    assert gradient_differences(model, whole) == {}


def test_microbatches_of_a_function_are_exact() -> None:
    run_ranks(2, train)


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
