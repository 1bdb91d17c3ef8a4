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


@pytest.mark.parametrize(("groups", "layer_class"), [(1, None), (2, "AlbertLayer")])
def test_a_module_for_each_time_with_shared_weights(groups: int, layer_class: str | None) -> None:
    model = albert(groups)
    message = rf"4 layers with the weights of {groups} .*num_hidden_groups=4, and let .* share their weights"
    with pytest.raises(ValueError, match=message):
        InProcessPipeline(model, 2, transformer_layer_cls=layer_class)
    remedied = albert(4)
    remedied.load_state_dict(model.state_dict(), strict=False)
    given = model.albert.encoder.albert_layer_groups
    for number, group in enumerate(remedied.albert.encoder.albert_layer_groups):
        first = remedied.albert.encoder.albert_layer_groups[number * groups // 4 * 4 // groups]
        for b, a in zip(group.modules(), first.modules(), strict=True):
            b._parameters.update(a._parameters)
        group.load_state_dict(given[number * groups // 4].state_dict())
    assert remedied.num_parameters() == model.num_parameters()

    # A gradient that several runs add to is summed in another order.
    pipeline = InProcessPipeline(remedied, 2, transformer_layer_cls=layer_class)
    assert distance(pipeline, remedied, copy.deepcopy(model), padded_batch(4), 2) < TIED_ROUNDING
