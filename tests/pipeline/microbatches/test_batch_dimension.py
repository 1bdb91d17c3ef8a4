"""``batch_dimension``: rows along another dimension than 0, and the outputs along it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.microbatches.batch_dimension import dimensions_of, output_dimension
from tests.support.run_ranks import run_ranks

ROWS, TOKENS, WIDTH, VOCABULARY = 8, 12, 16, 20


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
    """An RNN of (T, B, H) beside a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hidden + self.rnn(hidden)[0]
        return result


def of_rows(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (TOKENS, ROWS), generator=torch.Generator().manual_seed(0))


def train(rank: int) -> None:
    """The labels have one dimension, so that sizes tell (T, B): the error is of the sizes."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    whole, x, target = Classifier(), tokens(), torch.arange(ROWS) % 3
    common: dict[str, Any] = {"num_microbatches": 4, "transformer_layer_cls": Recurrent, "loss_fn": of_rows}
    with pytest.raises(ValueError, match=r"disagree on dimension 0, .*'x': 12, 'target': 8.*batch_dimension=1"):
        NxDPPModel(copy.deepcopy(whole), **common).run_train(x=x, target=target)
    wrongs: list[Any] = [-1, True, {"y": 1}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="batch_dimension"):
            NxDPPModel(copy.deepcopy(whole), **common, batch_dimension=wrong)
    with pytest.raises(ValueError, match="exclude each other"):
        NxDPPModel(copy.deepcopy(whole), **common, batch_dimension=1, split_inputs_fn=lambda inputs, _: [inputs])
    answers: list[Any] = [1, {"x": 1}]
    for answer in answers:
        whole.zero_grad()
        model = NxDPPModel(copy.deepcopy(whole), **common, batch_dimension=answer, check_against_module="first")
        loss = model.run_train(x=x, target=target)
        expected = [of_rows(whole(part), own) for part, own in zip(x.chunk(4, 1), target.chunk(4), strict=True)]
        for each in expected:
            (each / 4).backward()
        assert loss is None or (isinstance(loss, torch.Tensor) and torch.equal(loss, torch.stack(expected).mean()))
        own = dict(whole.named_parameters())
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, own[key].grad, atol=0, rtol=0)
        output = model.run_eval(x=x, everywhere=True)
        with torch.no_grad():
            torch.testing.assert_close(output, whole(x))


def test_sequences_first_train_as_in_one_process() -> None:
    run_ranks(2, train)


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
