"""Arguments of the mean over all labels: honoured, or refused with a remedy that works."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.kept_messages import KeptMessages
from tests.support.models import gradient_differences, make, microbatches, reference
from tests.support.run_ranks import run_ranks
from tests.support.uneven_labels import ONE_EMPTY, UNEVEN, MeanLayer, count_labels, mean_model, uneven_batch

ITEMS = "num_items_in_batch"


@pytest.fixture
def two_stages() -> Iterator[None]:
    parallel_state.initialize_debug(pipeline_model_parallel_size=2)
    yield
    parallel_state.destroy_model_parallel()


def count_all_labels(inputs: dict[str, Any]) -> Any:
    """The function that the message of a refusal shows."""
    return (inputs["labels"] != -100).sum()


def own_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


@pytest.mark.usefixtures("two_stages")
def test_a_model_that_does_not_divide_by_the_number_of_items_is_refused_at_construction() -> None:
    llama = make("llama", layers=2)
    llama.loss_function = own_loss
    for model, reason in (
        (make("bert", layers=2), f"does not divide a sum over labels by {ITEMS}"),
        (llama, f"does not divide a sum over labels by {ITEMS}"),
    ):
        parameters = list(model.parameters())
        with pytest.raises(ValueError, match=rf"{reason}.*Give count_items_fn"):
            NxDPPModel(model, loss_normalization="tokens")
        assert not any(parameter.is_meta for parameter in parameters), "before anything is changed"
    NxDPPModel(make("bert", layers=2), loss_normalization="tokens", count_items_fn=count_all_labels)


def _first(result: Any, microbatch: Any) -> Any:
    return result


@pytest.mark.usefixtures("one_rank")
def test_steps_that_are_refused() -> None:
    batch = uneven_batch(UNEVEN)
    empty = uneven_batch((0, 0, 0, 0))
    tokens: dict[str, Any] = {"num_microbatches": 4, "loss_normalization": "tokens"}
    counting = tokens | {"transformer_layer_cls": MeanLayer}
    # Nothing to count, or not by the model.
    wrapped = NxDPPModel(make("llama", layers=2), **tokens)
    for run in (wrapped.run_train, wrapped.run_eval):
        with pytest.raises(ValueError, match=r"no microbatch of the batch has an item \(4 in all\)"):
            run(**empty)
    with pytest.raises(ValueError, match=f"{ITEMS} must be a finite number above 0, not 0"):
        wrapped.run_train(**batch, num_items_in_batch=0)
    with pytest.raises(ValueError, match="has no loss"):
        wrapped.run_train(input_ids=batch["input_ids"])
    assert wrapped.run_eval(input_ids=batch["input_ids"]).logits.shape[0] == 8
    # A number that the loss ignores.
    bert = NxDPPModel(make("bert", layers=2), num_microbatches=4)
    with pytest.raises(ValueError, match=f"does not depend on {ITEMS}, and would ignore it. Leave {ITEMS} out"):
        bert.run_train(**batch, num_items_in_batch=5)
    bert.run_train(**batch)
    # Results of the function.
    results: list[tuple[Any, type[Exception]]] = [(-1, ValueError), ("2", TypeError), (0, ValueError)]
    for result, error in results:
        wrong = NxDPPModel(mean_model(2), **counting, count_items_fn=partial(_first, result))
        with pytest.raises(error, match=r"count_items_fn for microbatch 0|no microbatch of the batch"):
            wrong.run_train(**batch)
    # A split that leaves the number out.
    split = NxDPPModel(
        make("llama", layers=2),
        num_microbatches=4,
        split_inputs_fn=lambda inputs, count: microbatches({n: inputs[n] for n in batch}, count),
    )
    with pytest.raises(ValueError, match=f"split_inputs_fn left {ITEMS} out"):
        split.run_train(**batch, num_items_in_batch=5)
    split.run_train(**batch)


class Criterion(nn.Module):
    """A loss inside a module, which is one node of the graph."""

    def __init__(self, guarded: bool) -> None:
        super().__init__()
        self.guarded = guarded

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss.nan_to_num() if self.guarded else loss


class WithCriterion(nn.Module):
    def __init__(self, guarded: bool = False) -> None:
        super().__init__()
        self.model = mean_model(2)
        self.criterion = Criterion(guarded)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.model.embedding(input_ids)
        for layer in self.model.layers:
            x = layer(x)
        return {"loss": self.criterion(self.model.head(x), labels)}


@pytest.mark.usefixtures("one_rank")
def test_a_loss_that_is_not_a_number_in_a_module_of_the_user(caplog: pytest.LogCaptureFixture) -> None:
    batch = uneven_batch(ONE_EMPTY)
    batch["labels"][2:4] = -100
    arguments: dict[str, Any] = {"transformer_layer_cls": MeanLayer, "num_microbatches": 4}
    wrapped = NxDPPModel(WithCriterion(), **arguments)
    for run in (wrapped.run_train, wrapped.run_eval):
        with pytest.raises(ValueError, match=r"microbatch 1 of 4 has no label: all values of its labels are -100, and"):
            run(**batch)
    # A module that guards itself, and labels in each microbatch.
    guarded = NxDPPModel(WithCriterion(guarded=True), **arguments).run_train(**batch)
    assert isinstance(guarded, torch.Tensor)
    assert guarded.isfinite()
    assert "microbatches have" not in caplog.text
    uneven = NxDPPModel(WithCriterion(), **arguments)
    for run in (uneven.run_train, uneven.run_eval, wrapped.run_train):
        run(**uneven_batch(UNEVEN))
    assert caplog.text.count("the microbatches have 10 to 64 labels, and each weighs the same in the loss") == 1
    # The other remedy of the message.
    whole = reference(WithCriterion())
    tokens = NxDPPModel(WithCriterion(), **arguments, loss_normalization="tokens", count_items_fn=count_labels)
    expected = whole(**batch)["loss"]
    expected.backward()
    loss = tokens.run_train(**batch)
    assert isinstance(loss, torch.Tensor)
    assert abs(loss.item() / expected.item() - 1) < 1e-6
    differences = gradient_differences(tokens, whole)
    assert all(distance is not None and distance < 1e-6 for distance in differences.values()), differences


def train_others() -> None:
    batch = uneven_batch(ONE_EMPTY)
    # BERT counts the first label of a row too.
    batch["labels"][2:4] = -100
    check(make("bert", layers=2), batch, count_items_fn=count_all_labels)
    # The remedy of the refusal of a microbatch without labels.
    llama = make("llama", layers=2)
    llama.loss_function = own_loss
    check(llama, batch, count_items_fn=count_labels)
    check(make("llama", layers=2), batch, input_names=["input_ids", "labels"], deallocate_pipeline_outputs=True)


def check(model: Any, batch: dict[str, torch.Tensor], **arguments: Any) -> None:
    whole = reference(model)
    wrapped = NxDPPModel(
        model, num_microbatches=4, loss_normalization="tokens", broadcast_and_average_loss=True, **arguments
    )
    wrapped.trace(**{name: value.to("meta") for name, value in batch.items()})
    loss = wrapped.run_train(**batch)
    expected = whole(**batch).loss
    expected.backward()
    assert isinstance(loss, torch.Tensor)
    assert abs(loss.item() / expected.item() - 1) < 1e-6
    # The gradient of a key's bias is zero but for rounding.
    differences = {n: d for n, d in gradient_differences(wrapped, whole).items() if not n.endswith("key.bias")}
    assert all(distance is not None and distance < 1e-6 for distance in differences.values()), differences


class Block(nn.Linear):
    """A layer of logits (B, T, 8)."""


def of_rows(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def evaluate_uneven_rows() -> list[tuple[list[str], float, float]]:
    """The messages of evaluations of 10 rows in 4 microbatches, their losses and those of one process."""
    texts = KeptMessages().texts
    found = []
    for ignored in (0, 3):
        texts.clear()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(8, 8), *[Block(8, 8) for _ in range(4)])
        x, targets = torch.randint(8, (10, 7)), torch.randint(8, (10, 7))
        targets[0, :ignored] = -100
        expected = of_rows(net(x), targets)
        common: dict[str, Any] = {"transformer_layer_cls": Block, "broadcast_and_average_loss": True}
        model = NxDPPModel(net, num_microbatches=4, loss_fn=of_rows, **common)
        loss = model.run_eval(input=x, targets=targets)
        found.append(([text for text in texts if "labels, and each" in text], float(loss), float(expected)))
    return found


def on_two_ranks(rank: int) -> list[tuple[list[str], float, float]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    train_others()
    return evaluate_uneven_rows()


def test_other_models_have_the_mean_and_uneven_rows_weigh_by_their_labels_without_a_warning() -> None:
    (right, uneven), other = run_ranks(2, on_two_ranks)
    assert not right[0]
    assert right[1] == pytest.approx(right[2], rel=1e-6)
    assert ["each weighs as much as its rows" in text for text in uneven[0]] == [True]
    assert uneven[1] != pytest.approx(uneven[2], rel=1e-6)
    assert not any(texts for texts, *_ in other)
