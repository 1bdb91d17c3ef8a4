"""``loss_fn``: a loss outside of the model has the numbers of one process, bit for bit."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.models import gradient_differences, make, padded_batch, reference
from tests.support.plain_models import WIDTH, Block
from tests.support.run_ranks import run_ranks

CLASSES = 7


@dataclass
class Heads:
    """Output of a classifier."""

    first: Tensor
    more: dict[str, Tensor]


class Classifier(nn.Module):
    """A model without a loss; ``nested`` returns a dataclass."""

    def __init__(self, nested: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.nested = nested
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return Heads(self.head(x), {"features": x}) if self.nested else self.head(x)


def weighted(output: Heads, labels: dict[str, Tensor], weight: float = 1.0) -> Tensor:
    """Change its own copy of the labels, ask for data, and read all of a nested output."""
    targets = labels["targets"].clone()
    targets[targets == 0] = -100
    extra = output.more["features"].square().mean() if float(output.first.detach().sum()) != 0 else 0.0
    return F.cross_entropy(output.first, targets) + weight * extra + labels["soft"].mean()


def of_logits(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def classes(rows: int, name: str = "labels") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    return {
        "x": torch.randn(rows, WIDTH, generator=generator),
        name: torch.randint(CLASSES, (rows,), generator=generator),
    }


def nested(rows: int) -> dict[str, Any]:
    batch = classes(rows, "targets")
    return {"x": batch["x"], "labels": {"targets": batch["targets"], "soft": batch["x"].sum(1)}, "weight": 0.25}


def text(rows: int) -> dict[str, Any]:
    batch = padded_batch(rows)
    return {"input_ids": batch["input_ids"], "targets": batch["labels"]}


def parts_of(batch: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The inputs of each microbatch."""

    def part_of(value: Any, number: int) -> Any:
        if isinstance(value, dict):
            return {name: part_of(inner, number) for name, inner in value.items()}
        return value.chunk(count)[number] if isinstance(value, Tensor) else value

    return [part_of(batch, number) for number in range(count)]


def of_labels(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels)


CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "module": (Classifier, nn.CrossEntropyLoss(label_smoothing=0.1), classes(8, "target"), {}),
    "nested": (lambda: Classifier(nested=True), weighted, nested(8), {}),
    "tied": (lambda: make("tied_llama"), of_logits, text(8), {"schedule": "zb-v"}),
    "balanced": (Classifier, of_labels, classes(8), {"partition": "balanced", "partition_batch": classes(2)}),
    "given names": (Classifier, of_labels, classes(8), {"input_names": ["x", "labels"], "virtual_pipeline_size": 2}),
}


def one_process(whole: nn.Module, loss_fn: Any, batch: dict[str, Any], count: int) -> list[Tensor]:
    """Accumulate the gradients of the mean loss; return the losses."""
    losses = []
    for part in parts_of(batch, count):
        output = whole(part.pop("x", part.pop("input_ids", None)))
        # nn.CrossEntropyLoss calls its input otherwise than the model's output.
        loss = loss_fn(output, part["target"]) if "target" in part else loss_fn(output, **part)
        (loss / count).backward()
        losses.append(loss.detach())
    return losses


def differing(ours: list[Tensor], theirs: list[Tensor], what: str) -> list[str]:
    return [f"{what} {i}" for i, pair in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(*pair)]


def step_of(make_model: Any, loss_fn: Any, batch: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Texts about what differs from one process."""
    count = 4
    model = make_model()
    whole = reference(model)
    wrapped = NxDPPModel(
        model, num_microbatches=count, loss_fn=loss_fn, check_against_module="first", return_mb_loss=True, **settings
    )
    assert wrapped.original_module is model
    losses = one_process(whole, loss_fn, batch, count)
    trained = wrapped.run_train(**batch)
    evaluated = wrapped.run_eval(**batch)
    inputs = {name: batch[name] for name in ("x", "input_ids") if name in batch}
    output = None if "input_names" in settings else wrapped.run_eval(**inputs)
    found = [f"gradient of {name}: {far}" for name, far in gradient_differences(wrapped, whole).items()]
    if not wrapped.holds_last_stage:
        assert trained is None
        assert evaluated is None
        assert output is None
        return found
    if output is not None:
        expected = whole(**inputs)
        logits = [getattr(each, "logits", getattr(each, "first", each)) for each in (output, expected)]
        torch.testing.assert_close(*logits)
    assert isinstance(trained, list)
    return found + differing(trained, losses, "loss") + differing(evaluated, losses, "evaluated loss")


def every_case(rank: int) -> dict[str, list[str]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    return {name: step_of(*case) for name, case in CASES.items()}


def test_numbers_are_those_of_one_process() -> None:
    for found in run_ranks(2, every_case):
        tied = found.pop("tied")
        # The two gradients of a tied weight are summed in another order.
        assert all("embed_tokens" in each or "lm_head" in each for each in tied)
        assert all(float(each.partition(": ")[2]) < 1e-6 for each in tied)
        assert found == {name: [] for name in CASES if name != "tied"}


def wrapped(loss_fn: Any = F.cross_entropy, **settings: Any) -> NxDPPModel:
    return NxDPPModel(Classifier(), num_microbatches=2, loss_fn=loss_fn, **settings)


@pytest.mark.usefixtures("one_rank")
def test_a_model_of_logits_needs_it() -> None:
    with pytest.raises(ValueError, match=r"(?s)must be a tensor of one element.*loss_fn=lambda output, labels"):
        NxDPPModel(Classifier(), num_microbatches=2).run_train(x=torch.ones(4, WIDTH))
    # As the message says.
    model = wrapped(lambda output, labels: F.cross_entropy(output, labels))
    assert model.run_train(**classes(4)) is not None


@pytest.mark.usefixtures("one_rank")
def test_names_of_inputs_are_verified() -> None:
    model = wrapped()
    with pytest.raises(ValueError, match=r"labels.*loss_fn takes \['target', 'weight'"):
        model.run_train(**classes(4))
    with pytest.raises(ValueError, match=r"loss_fn takes \['target'\], and the inputs are \['x'\]"):
        model.run_train(x=torch.ones(4, WIDTH))
    with pytest.raises(ValueError, match=r"An input of the loss only is one of loss_fn, which is not given"):
        NxDPPModel(Classifier(), num_microbatches=2).run_train(**classes(4))
    assert model.run_train(**classes(4, "target")) is not None
    with pytest.raises(ValueError, match="forward needs"):
        model.run_train(target=classes(4)["labels"])


def of_trainers(outputs: Any, labels: Tensor, num_items_in_batch: float | None = None) -> Tensor:
    """A sum over labels, as functions for transformers' Trainer return."""
    total = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (labels.numel() if num_items_in_batch is None else num_items_in_batch)


@pytest.mark.usefixtures("one_rank")
def test_a_function_may_divide_by_the_number_of_items() -> None:
    ids = padded_batch(4)["input_ids"]
    model = NxDPPModel(make("llama"), num_microbatches=2, loss_fn=of_trainers)
    mean = model.run_train(input_ids=ids, labels=ids)
    given = model.run_train(input_ids=ids, labels=ids, num_items_in_batch=ids.numel())
    torch.testing.assert_close(given, mean)
    # Half of the number is twice the loss: it is not divided again.
    twice = model.run_train(input_ids=ids, labels=ids, num_items_in_batch=ids.numel() / 2)
    assert mean is not None
    torch.testing.assert_close(twice, 2 * mean)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loss_fn": "mse"}, TypeError, "loss_fn='mse' must be a function of the model's output"),
        ({"loss_fn": nn.Linear(1, 1)}, ValueError, "loss_fn=Linear has parameters"),
        ({"loss_fn": lambda *values: values[0]}, TypeError, "must take the output first"),
    ],
)
def test_functions_that_cannot_be_called_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        NxDPPModel(Classifier(), num_microbatches=2, **arguments)
