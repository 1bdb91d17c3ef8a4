"""Partitions by a function of the graph, and inputs without names."""

from collections.abc import Sequence

import pytest
import torch

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.tracing.graph.trace import TracedGraph
from tests.support.models import make, padded_batch, reference, train_in_one_process
from tests.support.run_ranks import run_ranks


def two_layers_on_the_last(traced: TracedGraph, stages: int) -> Sequence[str]:
    return traced.layers[-stages - 1 : -2]


def train(rank: int) -> tuple[list[torch.Tensor], bool, list[str]]:
    """Train one step with cuts from a function; return losses, ``True`` if gradients are exact, and the cuts."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = make("llama")
    whole = reference(model)
    pipeline = NxDPPModel(model, num_microbatches=2, partition=two_layers_on_the_last, return_mb_loss=True)
    batch = padded_batch(4)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"^training needs gradients, and they are off"):
        pipeline.run_train(**batch)
    losses = pipeline.run_train(**batch) or []
    evaluated = pipeline.run_eval(**batch) or []
    assert len(evaluated) == len(losses)
    train_in_one_process(whole, batch, 2)
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    exact = all(_equal(p.grad, expected[name]) for name, p in pipeline.local_module.named_parameters())
    return losses, exact, pipeline.pipeline_cuts


def _equal(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    return ours is not None and theirs is not None and torch.equal(ours, theirs)


def test_cuts_chosen_by_a_function_train_as_one_process() -> None:
    (none, first_exact, cuts), (losses, last_exact, same_cuts) = run_ranks(2, train)

    assert none == []
    assert len(losses) == 2
    assert first_exact
    assert last_exact
    assert cuts == same_cuts == ["model.layers.1"]


def test_a_function_and_cuts_exclude_each_other() -> None:
    config = PipelineConfig(make("llama"), partition=two_layers_on_the_last, pipeline_cuts=["model.layers.0"])

    with pytest.raises(ValueError, match=r"partition=.* and pipeline_cuts exclude each other"):
        config.check()
