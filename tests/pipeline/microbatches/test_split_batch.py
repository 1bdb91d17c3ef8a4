"""``split_inputs_fn``: microbatches of inputs whose first dimension is not the batch."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, PipelineConfig
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


def _train(rank: int) -> tuple[float, dict[str, Any]]:
    from nxdpp import parallel_state

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = NxDPPModel(
        Packed(), "Linear", num_microbatches=2, split_inputs_fn=by_sequences, broadcast_and_average_loss=True
    )
    loss = model.run_train(**batch())
    torch.distributed.barrier()
    assert isinstance(loss, torch.Tensor)
    return loss.item(), {name: p.grad for name, p in model.local_named_parameters()}


def test_microbatches_of_a_function_are_exact() -> None:
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


def test_inputs_of_other_first_dimensions_name_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"disagree on dimension 0.*split_inputs_fn"):
        split_batch(Packed(), batch(), 2, None, CPU)


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (lambda inputs, number: inputs, TypeError, "list of dicts"),
        (lambda inputs, number: [inputs], ValueError, "returned 1 microbatches; num_microbatches is 2"),
        (lambda inputs, number: [inputs, {"x": inputs["x"]}], ValueError, r"microbatch 1 the inputs \['x'\]"),
        (lambda inputs, number: [{"x": object()}] * 2, TypeError, "input x is a object"),
    ],
)
def test_other_results_of_the_function_are_refused(function: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        split_batch(Packed(), batch(), 2, function, CPU)


def test_a_value_that_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="split_inputs_fn='rows' must be a function"):
        PipelineConfig(split_inputs_fn="rows", transformer_layer_cls="Linear").check(Packed())  # type: ignore[arg-type]
