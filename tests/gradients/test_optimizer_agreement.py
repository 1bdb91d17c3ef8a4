"""Optimizers whose options differ between ranks, and that step on some ranks only."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, StepLR

import nxdpp
from nxdpp import NxDPPModel, parallel_state
from tests.support.kept_messages import KeptMessages
from tests.support.models import VOCABULARY, llama
from tests.support.run_ranks import run_ranks

STEPS = 5
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "stages": (2, {"pipeline_model_parallel_size": 2}),
    "replicas": (2, {}),
    "tensor": (2, {"tensor_model_parallel_size": 2}),
}


def wrapped(layout: str) -> Any:
    parallel_state.initialize_model_parallel(**LAYOUTS[layout][1], hang_timeout=60)
    torch.manual_seed(0)
    bare: Any = llama(max(2, parallel_state.get_pipeline_model_parallel_size()))
    if layout == "tensor":
        bare = nxdpp.tensor_parallelize(bare)
    return NxDPPModel(bare, num_microbatches=2)


def step(model: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + parallel_state.get_data_parallel_rank())
    ids = torch.randint(0, VOCABULARY, (4, 6), generator=generator)
    model.run_train(input_ids=ids, labels=ids)


def parts(model: Any, rank: int) -> tuple[torch.optim.Optimizer, LRScheduler]:
    optimizer = torch.optim.AdamW(model.local_parameters(), lr=0.1)
    return optimizer, StepLR(optimizer, 1, 0.5)


def other_rate(model: Any, rank: int) -> tuple[torch.optim.Optimizer, LRScheduler]:
    optimizer = torch.optim.AdamW(model.local_parameters(), lr=0.2 if rank else 0.1)
    return optimizer, StepLR(optimizer, 1, 0.5)


def by_layer(model: Any, rank: int) -> tuple[torch.optim.Optimizer, LRScheduler]:
    groups = [{"params": [each], "lr": 0.1 / (1 + (".1." in name))} for name, each in model.local_named_parameters()]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    return optimizer, StepLR(optimizer, 1, 0.5)


def always(rank: int, number: int) -> bool:
    return True


def on_rank_0(rank: int, number: int) -> bool:
    return rank == 0


def until_3(rank: int, number: int) -> bool:
    return rank == 0 or number < 3


Make = Callable[[Any, int], tuple[torch.optim.Optimizer, LRScheduler]]
When = Callable[[int, int], bool]
RATES = r"AdamW has other options on rank \d \(pipeline rank \d\): lr=0\.2, than on rank 0 .*: lr=0\.1\..*on every rank"
SCHEDULE = r"AdamW has other options on rank \d .*: lr=0\.1, than on rank 0 .*: lr=0\.05\..*scheduler\.step\(\)"
STAGE = (
    r"has stepped on pipeline rank 0 \(rank 0\) since .* none on pipeline rank 1 \(rank 1\).*Call optimizer\.step\(\)"
)
REPLICA = r"stepped after {} training steps on a rank, and after {} on another .*Call optimizer\.step\(\) on every rank"
TENSOR = (
    r"stepped after \d training steps? on tensor-parallel rank 0 .* after \d on tensor-parallel rank 1 .*Call optim"
)
MISTAKES: list[tuple[str, Make, When, When, str]] = [
    ("stages", other_rate, always, always, RATES),
    ("replicas", parts, always, on_rank_0, SCHEDULE),
    ("stages", parts, on_rank_0, always, STAGE),
    ("tensor", parts, until_3, always, TENSOR),
    ("replicas", parts, until_3, always, REPLICA.format(3, 4)),
]


def train(rank: int, layout: str, make: Make, steps: When, schedules: When) -> int:
    model = wrapped(layout)
    optimizer, scheduler = make(model, rank)
    for number in range(STEPS):
        step(model, number)
        if steps(rank, number):
            optimizer.step()
        if schedules(rank, number):
            scheduler.step()
        optimizer.zero_grad()
    return STEPS


@pytest.mark.parametrize(("layout", "make", "steps", "schedules", "words"), MISTAKES)
def test_a_mistake_of_one_rank_is_named(layout: str, make: Make, steps: When, schedules: When, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        run_ranks(LAYOUTS[layout][0], train, layout, make, steps, schedules)


def train_once(rank: int, layout: str, make: Make, clips: bool) -> None:
    """A training of one step; ``clips`` by other numbers on some ranks."""
    model = wrapped(layout)
    optimizer, _ = make(model, rank)
    step(model, 0)
    if clips:
        model.clip_grad_norm_(0.5 if rank else 1.0)
    optimizer.step()


CLIPS = r"clip_grad_norm_ last had max_norm=0\.5, .*had max_norm=1, .*Clip on every rank, by the same numbers"


@pytest.mark.parametrize(
    ("layout", "make", "clips", "words"), [("replicas", other_rate, False, RATES), ("stages", parts, True, CLIPS)]
)
def test_other_numbers_are_refused_in_a_training_of_one_step(layout: str, make: Make, clips: bool, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        run_ranks(LAYOUTS[layout][0], train_once, layout, make, clips)


def clip(rank: int, layout: str) -> None:
    """Train as a script that clips."""
    model = wrapped(layout)
    optimizer = torch.optim.SGD(model.local_parameters(), lr=0.1)
    for number in range(STEPS):
        step(model, number)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def train_head_alone(stages: int, freezes: bool) -> list[str]:
    """Train the last stage only, and return the warnings: the other ranks have no optimizer, and so no step to make."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages, hang_timeout=60)
    told = KeptMessages("no optimizer has parameters").texts
    bare: Any = llama(stages)
    if freezes:
        bare.model.requires_grad_(False)
    model = NxDPPModel(bare, num_microbatches=2)
    own = [each for name, each in model.local_named_parameters() if "lm_head" in name]
    optimizer = torch.optim.SGD(own, lr=0.1) if own else None
    for number in range(STEPS):
        step(model, number)
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
    parallel_state.destroy_model_parallel()
    return told


def heads(rank: int) -> list[list[str]]:
    return [train_head_alone(2, freezes) for freezes in (False, True)]


def test_stages_that_no_optimizer_trains_are_named_once() -> None:
    ((warning,), none), last = run_ranks(2, heads)
    assert "no optimizer has parameters of pipeline rank 0, which require gradients" in warning
    assert "an optimizer steps those of pipeline rank 1. " in warning
    assert "requires_grad_(False)" in warning
    assert none == []
    assert last == [[], []]


def train_parts(rank: int, pipeline: int, alternately: bool, everywhere: bool) -> int:
    """Train two parts of a model with rates of their own; unless ``everywhere`` ranks lack empty optimizers."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline, hang_timeout=60)
    torch.manual_seed(0)
    model = NxDPPModel(llama(4), num_microbatches=4)
    low: list[Any] = []
    high: list[Any] = []
    for name, parameter in model.local_named_parameters():
        (low if "embed" in name or ".0." in name or ".1." in name else high).append(parameter)
    # Rates are compared in the first step, before steps are.
    made = [(low, 0.1), (high, 0.2 if everywhere or not alternately else 0.1)]
    optimizers = [torch.optim.AdamW([{"params": own}], lr=rate) if own or everywhere else None for own, rate in made]
    for number in range(5):
        step(model, number)
        for optimizer in optimizers if not alternately else optimizers[number % 2 : number % 2 + 1]:
            if optimizer is not None:
                optimizer.step()
        model.zero_grad()
    parallel_state.destroy_model_parallel()
    return model.local_module is not None


@pytest.mark.parametrize(
    ("alternately", "sentence"),
    [(False, r"AdamW has other options on rank 1 .*lr=0\.2, than on rank 0"), (True, "has stepped on pipeline rank 0")],
)
def test_optimizers_of_parts_on_some_ranks_are_refused_with_the_remedy(alternately: bool, sentence: str) -> None:
    remedy = (
        r"An optimizer of a part of the model is made and stepped on every rank, also where its group is empty: Adam"
    )
    with pytest.raises(AssertionError, match=rf"(?s){sentence}.*{remedy}"):
        run_ranks(2, train_parts, 2, alternately, False)


def freeze_between(rank: int, layout: str) -> Any:
    """Freeze a parameter after ``no_sync()``, which is refused, and as the message says."""
    model = wrapped(layout)
    frozen: Any = next(iter(model.local_parameters()))
    with model.no_sync():
        step(model, 0)
    frozen.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"1 parameter was frozen .*\(model\..* is the first\).*Freeze them"):
        step(model, 1)
    frozen.grad = None
    step(model, 1)
    assert frozen.grad is None
    model.zero_grad()
    frozen.requires_grad_(True)
    with model.no_sync():
        step(model, 0)
    step(model, 1)
    frozen.requires_grad_(False)
    averaged: Any = frozen.grad
    own: torch.Tensor = averaged.clone()
    step(model, 2)
    torch.distributed.all_reduce(own, group=parallel_state.get_data_parallel_group())
    return (own / 2 - averaged).abs().max().item()


def what_is_alike(rank: int) -> float:
    """Equal options, rates by layer, clipping, and optimizers of parts; return the distance of a frozen gradient."""
    for layout in ("stages", "replicas", "tensor"):
        train(rank, layout, by_layer, always, always)
        parallel_state.destroy_model_parallel()
        clip(rank, layout)
        parallel_state.destroy_model_parallel()
    for alternately in (False, True):
        train_parts(rank, 2, alternately, True)
    distance: float = freeze_between(rank, "replicas")
    return distance


def test_ranks_that_do_alike_train() -> None:
    """A parameter of replicas that is frozen between is refused."""
    assert max(run_ranks(2, what_is_alike)) < 1e-6
