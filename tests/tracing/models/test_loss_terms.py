"""Numbers of labels of losses in graphs; a false one would refuse a good batch, or weight it wrongly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from nxdpp.tracing.graph.trace import TracedGraph, TracingOptions, trace_for
from nxdpp.tracing.models.loss_terms import (
    in_place_of,
    labels_of_modules,
    means,
)
from tests.support.models import make

LABELS = torch.tensor([[5, 7, -100, -100], [-100, -100, -100, 3]])
IDS = torch.tensor([[5, 7, 1, 2], [4, 4, 6, 3]])
VOCABULARY = 11


class Layer(nn.Linear):
    pass


class Model(nn.Module):
    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.loss = loss
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.layers = nn.ModuleList(Layer(4, 4) for _ in range(2))
        self.head = nn.Linear(4, VOCABULARY)
        self.mean = nn.CrossEntropyLoss(ignore_index=3)

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self, self.head(x), labels, num_items_in_batch)


def traced_loss(model: nn.Module, layer: type, **more: Any) -> tuple[TracedGraph, Any]:
    traced = trace_for(model, {"input_ids": IDS, "labels": LABELS, **more}, TracingOptions((layer,)))
    (values,) = next(node.args for node in traced.graph.nodes if node.op == "output")
    return traced, values[0]


def counts_of(loss: Callable[..., Any], labels: Tensor = LABELS) -> list[Any]:
    """The numbers of labels of the means in ``loss(model, logits, labels, number)``."""
    model = Model(loss)
    _, node = traced_loss(model, Layer)
    inputs = {"input_ids": IDS, "labels": labels}
    counts = [term.count(inputs) for term in means(node, model)]
    return [None if count is None else float(count) for count in counts]


def flat(logits: Tensor) -> Tensor:
    return logits.reshape(-1, VOCABULARY)


COUNTED: list[tuple[Callable[..., Any], list[Any]]] = [
    (lambda m, x, y, n: F.cross_entropy(flat(x[:, :-1]), y[:, 1:].reshape(-1)), [2]),
    (lambda m, x, y, n: F.cross_entropy(flat(x), F.pad(y, (0, 1), value=-100)[..., 1:].reshape(-1)), [2]),
    (lambda m, x, y, n: F.cross_entropy(x.transpose(1, 2), y), [3]),
    (lambda m, x, y, n: 0.5 * nn.CrossEntropyLoss()(flat(x), y.view(-1)) + x.square().mean(), [3]),
    (lambda m, x, y, n: m.mean(flat(x), y.clamp(min=0).view(-1)), [7]),
    (lambda m, x, y, n: F.nll_loss(flat(x).log_softmax(-1), y.view(-1).to(x.device)), [3]),
    (lambda m, x, y, n: F.cross_entropy(flat(x), y.view(-1), reduction="sum") / (y != -100).sum(), [3]),
    (lambda m, x, y, n: F.cross_entropy(flat(x), y.view(-1)) + m.mean(flat(x), y.view(-1).abs()), [3, None]),
    # Probabilities as targets are not counted.
    (lambda m, x, y, n: F.cross_entropy(x[:, :, :4].float(), y.float()), [None]),
]


@pytest.mark.parametrize(("loss", "expected"), COUNTED)
def test_labels_are_counted(loss: Callable[..., Any], expected: list[Any]) -> None:
    assert sorted(counts_of(loss), key=str) == sorted(expected, key=str)


# Losses that are defined without labels: nothing to count, or never 0.
DEFINED = [
    lambda m, x, y, n: F.cross_entropy(flat(x), y.view(-1), reduction="sum") / (y != -100).sum().clamp(min=1),
    lambda m, x, y, n: F.cross_entropy(flat(x), y.view(-1), reduction="sum") / y.size(0),
    lambda m, x, y, n: F.mse_loss(x[..., 0], y.float()),
]


@pytest.mark.parametrize("loss", DEFINED)
def test_other_losses_have_labels_or_no_number_of_them(loss: Callable[..., Any]) -> None:
    assert all(count is None or count > 0 for count in counts_of(loss, torch.full_like(LABELS, -100)))


@pytest.mark.parametrize(("kind", "expected"), [("llama", 2), ("bert", 3)])
def test_labels_of_transformers_are_those_of_their_losses(kind: str, expected: int) -> None:
    model = make(kind, layers=2)
    layer = {"llama": "model.layers.0", "bert": "bert.encoder.layer.0"}[kind]
    _, loss = traced_loss(model, type(model.get_submodule(layer)))
    (term,) = means(loss, model)
    assert int(term.count({"input_ids": IDS, "labels": LABELS})) == expected
    assert term.divisor is None


def test_labels_of_a_function_in_place_of_a_loss_of_transformers() -> None:
    @in_place_of(ForCausalLMLoss)
    def computed_otherwise(*args: Any, **kwargs: Any) -> Any:
        return ForCausalLMLoss(*args, **kwargs)

    model: Any = make("llama", layers=2)
    model.loss_function = computed_otherwise
    _, loss = traced_loss(model, type(model.model.layers[0]))
    (term,) = means(loss, model)
    assert (term.name, term.count({"input_ids": IDS, "labels": LABELS})) == ("computed_otherwise", 2)
    with pytest.raises(ValueError, match="cross_entropy is not one of ForCausalLMLoss, "):
        in_place_of(F.cross_entropy)


class Criterion(nn.Module):
    def forward(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def test_labels_of_a_module_that_makes_the_loss() -> None:
    model = Model(lambda model, logits, labels, number: model.criterion(logits, labels[:, 1:])["loss"] * 0.5)
    model.criterion = Criterion()
    _, loss = traced_loss(model, Layer)
    (term,) = labels_of_modules(loss, model)
    assert (term.name, term.count({"input_ids": IDS, "labels": LABELS})) == ("criterion", 2)
    # A known loss is counted before the step, and a head takes no labels.
    known = Model(lambda model, logits, labels, number: model.mean(logits.flatten(0, 1), labels.flatten()))
    _, loss = traced_loss(known, Layer)
    assert labels_of_modules(loss, known) == []
