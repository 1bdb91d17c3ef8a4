"""The search finds the layouts that a comparison of all layouts finds."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp.planning.bounds import LowerBounds
from nxdpp.planning.configured_model import microbatch_on_meta
from nxdpp.planning.layout import Layout, groups_of, schedules_of
from nxdpp.planning.machine import DEVICES, Job, Link, Machine
from nxdpp.planning.model_costs import ModelCosts
from nxdpp.planning.predict import Prediction, predict
from nxdpp.planning.search import rank_layouts, search
from nxdpp.planning.text_table import size_of
from tests.support.expert_models import mixtral

LLAMA = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)


@pytest.fixture(scope="module")
def costs() -> ModelCosts:
    """Four devices on one host, 4 samples; the counts of this model are shared by all tests."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA)
    machine = Machine(4, 10**9, DEVICES["cpu"], link=Link(2e8))
    return ModelCosts(model, machine, Job(4, lambda size: microbatch_on_meta(model, size, 64)))


@pytest.fixture(scope="module")
def everything(costs: ModelCosts) -> list[Prediction]:
    layers = len(costs.of(1, False, 1).layers)
    return [
        predict(costs, replace(group, schedule=schedule, chunks=chunks))
        for group in groups_of(4, 4, 4, layers, (1, 2))
        for schedule, chunks in schedules_of(group.pipeline, layers)
    ]


def _limited(costs: ModelCosts, memory: int) -> ModelCosts:
    limited = object.__new__(ModelCosts)
    vars(limited).update(vars(costs))
    limited.machine = replace(costs.machine, memory=memory)
    return limited


@pytest.mark.parametrize("percentile", [100, 5])
def test_the_search_equals_a_comparison_of_all_layouts(
    costs: ModelCosts, everything: list[Prediction], percentile: int
) -> None:
    sizes = sorted(each.peak_bytes for each in everything)
    memory = int(sizes[len(sizes) * percentile // 100 - 1]) + 1

    found = search(_limited(costs, memory))

    fitting = sorted((each for each in everything if each.peak_bytes <= memory), key=lambda each: each.step_seconds)
    # The best of each choice of sizes and switches.
    choices: dict[Layout, Prediction] = {}
    for each in fitting:
        choices.setdefault(replace(each.layout, schedule="", chunks=1, microbatch=1), each)
    assert [each.step_seconds for each in found.best] == [each.step_seconds for each in choices.values()][:10]
    assert found.refused.keys() == {4}
    if percentile == 100:
        assert found.predicted < len(everything)


@pytest.mark.parametrize(
    "fixed",
    [
        {"pipeline": 2, "tensor": 2},
        {"schedule": "zb-v", "checkpoint": True},
        {"data": 4, "zero": 1, "microbatch": 1},
        {"chunks": 2, "schedule": "interleaved"},
    ],
)
def test_fixed_fields_are_kept(costs: ModelCosts, everything: list[Prediction], fixed: dict[str, Any]) -> None:
    found = search(costs, fixed, best=1)

    fitting = [each for each in everything if all(getattr(each.layout, name) == fixed[name] for name in fixed)]
    assert found.best[0].step_seconds == min(each.step_seconds for each in fitting)
    assert all(getattr(found.best[0].layout, name) == value for name, value in fixed.items())


def test_too_little_memory_names_the_smallest_need(costs: ModelCosts, everything: list[Prediction]) -> None:
    least = min(each.peak_bytes for each in everything)

    with pytest.raises(ValueError, match=r"no layout fits into .* GiB of a device: the smallest one needs ") as caught:
        search(_limited(costs, 1000))
    named = re.search(r"needs ([\d.]+) GiB", str(caught.value))
    assert named is not None
    assert least / 2**30 <= float(named[1]) <= 1.002 * least / 2**30
    # A device of so much memory is enough.
    found = search(_limited(costs, size_of(f"{named[1]}GiB", "device_memory")))
    assert found.best[0].peak_bytes == least


def test_impossible_sizes_are_refused_with_the_reason(costs: ModelCosts) -> None:
    with pytest.raises(ValueError, match=r"with tensor=4 fits the model .* Tensor-parallel size 4: .* has 2 heads"):
        search(costs, {"tensor": 4})
    with pytest.raises(ValueError, match="no layout of 4 devices on 1 host with pipeline=3"):
        search(costs, {"pipeline": 3})
    with pytest.raises(ValueError, match="fixed names stages, but a layout has checkpoint, chunks"):
        search(costs, {"stages": 3})
    with pytest.raises(ValueError, match=r"there is no schedule '2f2b'\. Choose one of"):
        search(costs, {"schedule": "2f2b"})
    with pytest.raises(ValueError, match="best=-1 must be a whole number of at least 1"):
        search(costs, best=-1)
    with pytest.raises(ValueError, match="layouts is empty"):
        rank_layouts(costs, [])


def test_given_layouts_are_compared(costs: ModelCosts) -> None:
    layouts = [Layout(tensor=a, pipeline=b, data=4 // a // b) for a, b in product((1, 2), (1, 2))]

    found = rank_layouts(costs, layouts)

    assert {each.layout for each in found.best} == set(layouts)
    assert [each.step_seconds for each in found.best] == sorted(each.step_seconds for each in found.best)


def test_a_prediction_of_many_microbatches_is_that_of_the_whole_schedule() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA)
    job = Job(24, lambda size: microbatch_on_meta(model, size, 64))
    costs = ModelCosts(model, Machine(2, 10**9, DEVICES["cpu"]), job)
    for schedule, chunks in schedules_of(2, 4):
        layout = Layout(pipeline=2, schedule=schedule, chunks=chunks)
        few = predict(costs, layout)
        whole = predict(costs, layout, shorten=False)
        assert few.step_seconds == pytest.approx(whole.step_seconds, rel=1e-6), layout
        assert few.peak_bytes == pytest.approx(whole.peak_bytes, rel=2e-3), layout


def _mixture(memory: int, device: str = "h100") -> ModelCosts:
    """Four devices and 8 samples of 64 tokens."""
    with torch.device("meta"):
        model = mixtral(4, hidden_size=64, intermediate_size=4096)
        nn.Module.to(model, torch.bfloat16)
    machine = Machine(4, memory, DEVICES[device], link=Link(1e9))
    return ModelCosts(model, machine, Job(8, lambda size: microbatch_on_meta(model, size, 64)))


def test_experts_are_divided_where_no_rank_could_hold_them_all() -> None:
    fixed = {"tensor": 1, "pipeline": 1, "zero": 0}
    whole = rank_layouts(_mixture(10**12), [Layout(data=4)]).best[0]
    costs = _mixture(int(0.6 * whole.peak_bytes))

    found = search(costs, fixed, best=20)

    assert {each.layout.experts for each in found.best} <= {2, 4}
    assert found.too_large
    with pytest.raises(ValueError, match=r"3 replicas cannot share the experts .* one of 1, 2, 4"):
        search(costs, {"experts": 3})


def test_bounds_of_layouts_of_mixtures_are_below_their_predictions() -> None:
    costs = _mixture(10**12)
    bounds = LowerBounds(costs)
    groups = [
        Layout(1, pipeline, 4 // pipeline, zero=zero, checkpoint=checkpoint, experts=experts)
        for pipeline, experts in ((1, 1), (1, 4), (2, 2))
        for zero, checkpoint in product((0, 1, 3), (False, True))
    ]
    for group in groups:
        for schedule, chunks in schedules_of(group.pipeline, 5):
            layout = replace(group, schedule=schedule, chunks=chunks)
            found = predict(costs, layout)
            for bound in (bounds.of_undivided(layout), bounds.of_group(layout), bounds.of_layout(layout)):
                assert bound.seconds <= found.step_seconds * (1 + 1e-9), layout
                assert bound.bytes <= found.peak_bytes * (1 + 1e-9), layout
