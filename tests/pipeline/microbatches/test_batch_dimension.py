"""``batch_dimension``: rows along another dimension than 0, and the outputs along it."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.microbatches.batch_dimension import dimensions_of, output_dimension
from nxdpp.pipeline.microbatches.split_batch import split_batch
from tests.support.run_ranks import run_ranks

ROWS, TOKENS, WIDTH, VOCABULARY = 8, 12, 16, 20


class Encoder(nn.Module):
    """Layers of (T, B, H), as torch makes them without ``batch_first``."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.sequence = int(batch_first)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=batch_first) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[self.sequence])
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        logits: torch.Tensor = self.head(hidden)
        return logits


class Classifier(nn.Module):
    """A class (B, classes) of each sequence (T, B), by recurrent layers of (T, B, H)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Recurrent() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        classes: torch.Tensor = self.head(hidden.mean(0))
        return classes


class Recurrent(nn.Module):
    """A GRU of (T, B, H) beside a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hidden + self.gru(hidden)[0]
        return result


def of_tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def of_rows(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


def tokens(rows: int = ROWS, length: int = TOKENS) -> torch.Tensor:
    return torch.randint(VOCABULARY, (length, rows), generator=torch.Generator().manual_seed(rows + length))


def _case(name: str) -> tuple[nn.Module, Any, dict[str, torch.Tensor], Any, Any]:
    """A model, its loss, a batch, and answers to the question."""
    x = tokens()
    if name == "tokens":
        return Encoder(), of_tokens, {"x": x, "target": x.roll(-1, 0)}, 1, {"x": 1, "target": 1}
    # The labels have one dimension, so that sizes tell (T, B): the error is of the sizes.
    return Classifier(), of_rows, {"x": x, "target": torch.arange(ROWS) % 3}, 1, {"x": 1}


def train(rank: int, ranks: int, name: str, by_name: bool) -> list[str]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    torch.manual_seed(0)
    module, loss_fn, batch, number, names = _case(name)
    torch.manual_seed(0)
    whole = _case(name)[0]
    whole.load_state_dict(module.state_dict())
    common: dict[str, Any] = {
        "num_microbatches": 4,
        "transformer_layer_cls": [nn.TransformerEncoderLayer] if name == "tokens" else [Recurrent],
        "loss_fn": loss_fn,
        "broadcast_and_average_loss": True,
    }
    with pytest.raises(ValueError, match="batch_dimension=1") as asked:
        NxDPPModel(_case(name)[0], **common).run_train(**batch)
    model = NxDPPModel(module, **common, batch_dimension=names if by_name else number, check_against_module="first")
    for _ in range(3):
        model.zero_grad()
        whole.zero_grad()
        loss = model.run_train(**batch)
        expected = []
        for part in zip(batch["x"].chunk(4, 1), batch["target"].chunk(4, batch["target"].ndim - 1), strict=True):
            expected.append(loss_fn(whole(part[0]), part[1]))
            (expected[-1] / 4).backward()
        assert loss.item() == torch.stack(expected).mean().item()
        # Sequences are whole in a microbatch: the loss is the one of the batch.
        torch.testing.assert_close(loss, loss_fn(whole(batch["x"]), batch["target"]).detach())
        own = dict(whole.named_parameters())
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, own[key].grad, atol=0, rtol=0)
    output = model.run_eval(x=batch["x"])
    if model.holds_last_stage:
        with torch.no_grad():
            torch.testing.assert_close(output, whole(batch["x"]))
    return [str(asked.value)]


@pytest.mark.parametrize("by_name", [False, True], ids=["number", "names"])
@pytest.mark.parametrize("name", ["tokens", "classes"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_sequences_first_train_as_in_one_process(ranks: int, name: str, by_name: bool) -> None:
    for (asked,) in run_ranks(ranks, train, ranks, name, by_name):
        if name == "tokens":
            assert "layers.0.self_attn, a MultiheadAttention, takes sequences first (batch_first=False)" in asked
            assert f"x (12, 8), target (12, 8)) fit two readings: {TOKENS} rows of {ROWS} tokens" in asked
        else:
            assert "disagree on dimension 0, the batch: {'x': 12, 'target': 8}" in asked


class Flat(Encoder):
    """Returns (T * B, vocabulary), as the language model of torch's examples does, whose targets are (T * B,)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).flatten(0, 1)


def train_flat(rank: int, ranks: int) -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    torch.manual_seed(0)
    module, x = Flat(), tokens()
    target = x.roll(-1, 0).flatten()
    common: dict[str, Any] = {"num_microbatches": 4, "transformer_layer_cls": nn.TransformerEncoderLayer}
    with pytest.raises(ValueError, match="disagree on dimension 0, the batch") as told:
        NxDPPModel(Flat(), **common, loss_fn=of_rows).run_train(x=x, target=target)
    text = str(told.value)
    # The remedy, word for word: the loss, the dimension and the shape.
    names: dict[str, Any] = {"cross_entropy": nn.functional.cross_entropy, "x": x, "target": target}
    loss_fn = eval(text[text.index("lambda output") : text.index(". Where x")], names)
    assert "Give target.reshape(x.shape[:2]), and flatten it" in text
    assert "NxDPPModel(..., batch_dimension=1)" in text
    whole = Flat()
    whole.load_state_dict(module.state_dict())
    model = NxDPPModel(module, **common, loss_fn=loss_fn, batch_dimension=1, broadcast_and_average_loss=True)
    loss = model.run_train(x=x, target=target.reshape(x.shape[:2]))
    expected = of_rows(whole(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    own = dict(whole.named_parameters())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, own[key].grad)
    return text


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_the_remedy_for_flat_targets_trains_as_in_one_process(ranks: int) -> None:
    for text in run_ranks(ranks, train_flat, ranks):
        assert text.index("target.reshape") < text.index("shared_inputs")


def _asked_once(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer
    common: dict[str, Any] = {"num_microbatches": 2, "transformer_layer_cls": layer, "loss_fn": of_tokens}
    x = tokens()
    # What the message advises: the model transposes itself.
    model = NxDPPModel(Encoder(), **common, batch_dimension=0)
    model.run_train(x=x, target=x)
    # Nothing asks where no module takes sequences first, nor for one microbatch.
    model = NxDPPModel(Encoder(batch_first=True), **common)
    model.run_train(x=x, target=x)
    model = NxDPPModel(Encoder(), **common | {"num_microbatches": 1})
    model.run_train(x=x, target=x)
    for wrong, text in (
        (-1, "must be a dimension of all inputs"),
        (True, "must be a dimension of all inputs"),
        ({"y": 1}, "batch_dimension"),
    ):
        with pytest.raises(ValueError, match=text):
            NxDPPModel(Encoder(), **common, batch_dimension=wrong)
    with pytest.raises(ValueError, match="exclude each other"):
        NxDPPModel(Encoder(), **common, batch_dimension=1, split_inputs_fn=lambda inputs, number: [inputs] * number)


def test_it_is_a_question_once() -> None:
    run_ranks(2, _asked_once)


def test_values_of_a_dict_are_split_along_dimensions_by_their_names() -> None:
    batch = {"x": tokens(), "mask": torch.ones(ROWS, TOKENS)}
    inputs = {"batch": batch, "causal": torch.ones(TOKENS, TOKENS)}
    names = {"batch['x']": 1}

    parts, are_alike = split_batch(nn.GRU(1, 1), inputs, 4, None, torch.device("cpu"), ["causal"], None, names)

    assert are_alike
    for number, part in enumerate(parts):
        assert torch.equal(part["batch['x']"], batch["x"].chunk(4, 1)[number])
        assert torch.equal(part["batch['mask']"], batch["mask"].chunk(4)[number])
        assert part["causal"] is inputs["causal"]
    with pytest.raises(ValueError, match=r"disagree on their batch_dimension, the batch: .*'x'.*: 8, .*'mask'.*: 12"):
        split_batch(nn.GRU(1, 1), inputs, 4, None, torch.device("cpu"), ["causal"], None, names | {"batch['mask']": 1})


def test_dimensions_of_inputs_and_outputs() -> None:
    inputs = {"x": torch.ones(12, 8, 3), "lengths": torch.ones(8), "scale": 2.0}

    assert dimensions_of(inputs, None) == {"x": 0, "lengths": 0, "scale": 0}
    assert dimensions_of(inputs, 1) == {"x": 1, "lengths": 0, "scale": 0}
    assert dimensions_of(inputs, {"x": 2}) == {"x": 2, "lengths": 0, "scale": 0}
    with pytest.raises(ValueError, match=r"batch_dimension\['lengths'\] is 1, and lengths has the shape \(8,\)"):
        dimensions_of(inputs, {"lengths": 1})
    assert output_dimension(torch.ones(12, 2, 5), 1, 2) == 1
    assert output_dimension(torch.ones(2, 5), 1, 2) == 0
    assert output_dimension(torch.ones(2, 2), None, 2) == 0
    with pytest.raises(ValueError, match="along 0 or 1 of the dimensions") as caught:
        output_dimension(torch.ones(2, 2), {"x": 1}, 2)
    assert "batch_dimension={'x': 1, 'return': 1}" in str(caught.value)
    assert output_dimension(torch.ones(2, 2), {"x": 1, "return": 1}, 2) == 1
    assert output_dimension(torch.ones(2, 2), {"x": 1, "return": 0}, 2) == 0
    with pytest.raises(ValueError, match="along none of the dimensions"):
        output_dimension(torch.ones(7, 7), 1, 2)
