"""Inputs in dicts: split and traced like inputs of their own."""

from collections import OrderedDict
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding, LlamaForCausalLM

from nxdpp import NxDPPModel, parallel_state
from tests.support.exact import assert_exact
from tests.support.in_process import InProcessPipeline
from tests.support.models import make, padded_batch
from tests.support.run_ranks import run_ranks
from tests.support.traced_models import PlainLayer, PlainModel

X, Y = torch.arange(16.0).reshape(4, 4) / 16, torch.ones(4, 1)


class Batched(PlainModel):
    """The batch in one dict, and how to weigh it."""

    def factor(self, weight: Any) -> Any:
        return weight[0] + sum(weight[1]) * len(weight) if isinstance(weight, list) else weight * 3.0

    def forward(self, batch: Any, weight: Any = 1.0) -> Tensor:
        x = batch["x"]
        if batch.get("mask") is not None:
            x = x * batch["mask"]
        if batch.get("doubled"):
            x = x * 2
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden)
        target = batch["more"]["y"] if "more" in batch else batch["y"]
        result: Tensor = (self.head(hidden) - target).pow(2).mean() * self.factor(weight)
        return result


BATCHES: dict[str, dict[str, Any]] = {
    "plain": {"batch": {"x": X, "y": Y}},
    "nested": {"batch": {"x": X, "more": {"y": Y}}},
    "many kinds": {
        "batch": OrderedDict(x=X, y=Y, mask=None, doubled=numpy.bool_(True), index=3),
        "weight": [1, (0.5, 3), numpy.int64(2)],
    },
    "of a tokenizer": {"batch": BatchEncoding({"x": X, "y": Y, "mask": torch.ones(1, 4) / 3}), "weight": 2.0},
}


@pytest.mark.parametrize("name", ["nested", "many kinds", "of a tokenizer"])
def test_a_dict_is_exact(name: str) -> None:
    assert_exact(Batched(), BATCHES[name], PlainLayer)


def test_the_inputs_are_unknown_at_construction() -> None:
    pipeline = InProcessPipeline(Batched(), 2, transformer_layer_cls=PlainLayer)
    losses = [pipeline.train(BATCHES[name], 2) for name in ("plain", "nested", "plain")]
    assert all(map(torch.equal, losses[0], losses[2]))
    assert all(map(torch.equal, losses[0], losses[1]))


class Llama(torch.nn.Module):
    """A transformers model in a module with a training step, as of Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.model: LlamaForCausalLM = make("llama")

    def forward(self, batch: Any) -> Any:
        return self.model(**batch).loss


def test_a_dict_is_passed_on_to_a_transformers_model() -> None:
    pipeline = assert_exact(Llama(), {"batch": padded_batch(4)})
    assert len(pipeline.partition.layers) == 4


def costs(rank: int) -> Any:
    """Cuts by cost for a batch in a dict, and a step that is compared with the unwrapped module."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    inputs = BATCHES["nested"]
    wrapped = NxDPPModel(
        Batched(),
        PlainLayer,
        num_microbatches=2,
        partition="balanced",
        partition_batch=inputs,
        check_against_module="first",
        broadcast_and_average_loss=True,
    )
    wrapped.trace(batch=on_meta(inputs["batch"]))
    wrapped.run_eval(**inputs)
    return wrapped.run_train(**inputs)


def on_meta(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: on_meta(v) if isinstance(v, dict) else v.to("meta") for k, v in batch.items()}


def test_a_dict_over_ranks() -> None:
    whole = Batched()
    expected = torch.stack([whole({"x": x, "y": y}) for x, y in zip(X.chunk(2), Y.chunk(2), strict=True)]).mean()
    assert all(torch.equal(loss, expected) for loss in run_ranks(2, costs))
