"""Layers that run several times in one forward are refused, and the remedies of the message are followed."""

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AlbertConfig, AlbertForMaskedLM

from tests.support.in_process import InProcessPipeline
from tests.support.models import VOCABULARY, padded_batch
from tests.support.plain_models import WIDTH, Base, Block
from tests.support.sized_models import train_whole
from tests.support.training_distance import TIED_ROUNDING, distance


class Preferences(Base):
    """Chosen and rejected rows, through the layers one after the other."""

    def score(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.through(self.blocks, self.embedding(rows)))
        return result

    def forward(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        return -F.logsigmoid(self.score(chosen) - self.score(rejected)).mean()


class Concatenated(Preferences):
    """The remedy: all rows at once."""

    def forward(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        better, worse = self.score(torch.cat([chosen, rejected])).chunk(2)
        return -F.logsigmoid(better - worse).mean()


def test_one_concatenated_batch() -> None:
    torch.manual_seed(0)
    model = Preferences()
    batch = {"chosen": torch.randn(4, WIDTH), "rejected": torch.randn(4, WIDTH)}
    with pytest.raises(ValueError, match=r"Run several times: \['blocks\.0', .*for all rows \(torch\.cat\) and split"):
        InProcessPipeline(model, 2, transformer_layer_cls=Block)
    remedied = Concatenated()
    remedied.load_state_dict(model.state_dict())
    whole = copy.deepcopy(remedied)

    losses = InProcessPipeline(remedied, 2, transformer_layer_cls=Block).train(batch, 2)

    assert all(map(torch.equal, losses, train_whole(whole, batch, 2)))
    torch.testing.assert_close(torch.stack(losses), torch.stack(train_whole(model, batch, 2)))
    for name, parameter in remedied.named_parameters():
        assert torch.equal(parameter.grad, whole.get_parameter(name).grad), name  # type: ignore[arg-type]
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)


def albert(groups: int) -> Any:
    torch.manual_seed(0)
    return AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=VOCABULARY, embedding_size=16, hidden_size=32, num_hidden_layers=4, num_hidden_groups=groups,
            num_attention_heads=4, intermediate_size=48, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def test_a_module_for_each_time_with_shared_weights() -> None:
    model = albert(1)
    with pytest.raises(ValueError, match=r"Run several times: .*a module for each time and share the weights"):
        InProcessPipeline(model, 2, transformer_layer_cls="AlbertLayerGroup")
    remedied = albert(4)
    remedied.load_state_dict(model.state_dict(), strict=False)
    groups = remedied.albert.encoder.albert_layer_groups
    for group in groups[1:]:
        for theirs, ours in zip(group.modules(), groups[0].modules(), strict=True):
            for name, parameter in ours._parameters.items():
                theirs._parameters[name] = parameter
    assert remedied.num_parameters() == model.num_parameters()

    # A gradient that several runs add to is summed in another order.
    pipeline = InProcessPipeline(remedied, 2, transformer_layer_cls="AlbertLayerGroup")
    assert distance(pipeline, remedied, copy.deepcopy(model), padded_batch(4), 2) < TIED_ROUNDING
