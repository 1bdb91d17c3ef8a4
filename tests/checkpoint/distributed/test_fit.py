"""Optimizers and schedulers of torch go on exactly; what does not fit is refused before anything changes."""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import AdamW, Optimizer
from torch.optim import lr_scheduler as rates

from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint
from nxdpp.gradients.optimizer.fp32_adamw import AdamW_FP32OptimParams

MakeOptimizer = Callable[..., Optimizer]


class Small(nn.Module):
    """Two layers around a norm with persistent buffers."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32, width: int = 8, frozen: bool = False) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first = nn.Linear(width, 6, dtype=dtype)
        self.norm = nn.BatchNorm1d(6, dtype=dtype)
        self.last = nn.Linear(6, 4, dtype=dtype)
        self.last.weight.requires_grad_(not frozen)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``(rows, 4)``."""
        result: torch.Tensor = self.last(self.norm(self.first(inputs)))
        return result


def _train(model: Small, optimizer: Optimizer, scheduler: Any, steps: Iterable[int]) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(step)).to(model.first.weight.dtype)
        loss = model(inputs).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if isinstance(scheduler, rates.ReduceLROnPlateau):
            scheduler.step(loss.item())
        elif scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def _check_goes_on(path: Path, make: MakeOptimizer, make_rates: Any = None, before: int = 3, **options: Any) -> None:
    def new(seed: int) -> tuple[Small, Optimizer, Any]:
        model = Small(seed, **options)
        optimizer = make(model.parameters())
        return model, optimizer, None if make_rates is None else make_rates(optimizer)

    first = new(0)
    _train(*first, range(before))
    save_checkpoint(path, "saved", *first)
    expected = _train(*first, range(before, before + 4))
    second = new(1)
    load_checkpoint(path, "saved", *second)
    assert _train(*second, range(before, before + 4)) == expected
    for name, value in first[0].state_dict().items():
        assert torch.equal(second[0].state_dict()[name], value), name
    assert [group["lr"] for group in second[1].param_groups] == [group["lr"] for group in first[1].param_groups]


OPTIMIZERS: list[MakeOptimizer] = [
    partial(optim.SGD, lr=0.01),
    partial(optim.SGD, lr=0.01, momentum=0.9),
    optim.Adagrad,
    optim.Adafactor,
    partial(optim.RMSprop, momentum=0.9, centered=True),
    partial(optim.Adam, amsgrad=True),
    optim.ASGD,
]


@pytest.mark.parametrize("number", range(len(OPTIMIZERS)))
def test_an_optimizer_of_torch_goes_on(number: int, tmp_path: Path) -> None:
    _check_goes_on(tmp_path, OPTIMIZERS[number])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "one cycle": lambda optimizer: rates.OneCycleLR(optimizer, 1e-2, total_steps=20),
    "milestones": lambda optimizer: rates.MultiStepLR(optimizer, [2, 5]),
    "sequence": lambda optimizer: rates.SequentialLR(
        optimizer, [rates.LinearLR(optimizer, total_iters=2), rates.CosineAnnealingLR(optimizer, 10)], [2]
    ),
    "plateau": lambda optimizer: rates.ReduceLROnPlateau(optimizer, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on(name: str, tmp_path: Path) -> None:
    _check_goes_on(tmp_path, partial(AdamW, lr=1e-2), SCHEDULERS[name])


def test_a_scheduler_of_another_class_is_refused_and_one_left_out_is_named(tmp_path: Path) -> None:
    model = Small()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    save_checkpoint(tmp_path, "saved", model, optimizer, rates.CosineAnnealingLR(optimizer, 10))
    other = rates.StepLR(optimizer, 5)
    with pytest.raises(
        ValueError, match="has T_max, eta_min, and this StepLR has gamma, step_size: make the scheduler"
    ):
        load_checkpoint(tmp_path, "saved", model, optimizer, other)
    assert not hasattr(other, "T_max")
    with pytest.warns(UserWarning, match="has the state of a scheduler, which is not loaded: give scheduler="):
        load_checkpoint(tmp_path, "saved", model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(tmp_path, "saved", model)


def test_masters_frozen_parameters_and_an_unused_optimizer_go_on(tmp_path: Path) -> None:
    _check_goes_on(tmp_path / "masters", partial(AdamW_FP32OptimParams, lr=1e-2), dtype=torch.bfloat16)
    _check_goes_on(tmp_path / "frozen", partial(AdamW, lr=1e-2), frozen=True)
    _check_goes_on(tmp_path / "unused", partial(AdamW, lr=1e-2), before=0)


def test_masters_without_a_place_are_named_in_a_warning(tmp_path: Path) -> None:
    model = Small(dtype=torch.bfloat16)
    optimizer = AdamW_FP32OptimParams(model.parameters(), lr=1e-2)
    _train(model, optimizer, None, range(2))
    save_checkpoint(tmp_path, "saved", model, optimizer)
    other = Small(1, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"float32 master copies of first.bias.*left out") as caught:
        load_checkpoint(tmp_path, "saved", other, AdamW(other.parameters(), lr=1e-2))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(tmp_path, "saved", other, AdamW_FP32OptimParams(other.parameters(), lr=1e-2))


def _grouped(model: Small) -> Optimizer:
    rest = [*model.norm.parameters(), *model.last.parameters()]
    groups: list[dict[str, Any]] = [{"params": list(model.first.parameters())}, {"params": rest, "weight_decay": 0.0}]
    return AdamW(groups, lr=1e-2)


def _regrouped(model: Small) -> Optimizer:
    rest = [*model.norm.parameters(), *model.first.parameters()]
    groups: list[dict[str, Any]] = [{"params": list(model.last.parameters())}, {"params": rest, "weight_decay": 0.0}]
    return AdamW(groups, lr=1e-2)


def _single(model: Small) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2)


def _partial(model: Small) -> Optimizer:
    return AdamW(model.last.parameters(), lr=1e-2)


def _other_class(model: Small) -> Optimizer:
    return optim.SGD(model.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    ("saved", "loaded", "options", "message"),
    [
        (_single, _grouped, {}, "in groups with weight_decay=0.01 and 0.0, and were in one group of the checkpoint"),
        (_grouped, _single, {}, r"param_groups\[0\] has first.weight and norm.weight, whose weight_decay differs"),
        (_grouped, _regrouped, {}, r"param_groups\[1\] has norm.weight and first.weight, whose weight_decay differs"),
        (_single, _partial, {}, "has first.bias, first.weight, norm.bias, norm.weight, and this optimizer does not"),
        (_partial, _single, {}, "the checkpoint's optimizer did not have first.weight"),
        (_single, _other_class, {}, "has the state of AdamW, and the optimizer is SGD"),
        (_single, _single, {"width": 7}, r"first.weight is of shape \[6, 8\]"),
        (_single, _single, {"dtype": torch.bfloat16}, "first.weight is of shape .* torch.float32 in .* torch.bfloat16"),
    ],
)
def test_others_are_refused_before_anything_changes(
    saved: MakeOptimizer, loaded: MakeOptimizer, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = Small()
    optimizer = saved(model)
    _train(model, optimizer, None, range(2))
    save_checkpoint(tmp_path, "saved", model, optimizer)
    other = Small(1, **options)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    theirs = loaded(other)
    state = theirs.state_dict()
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path, "saved", other, theirs)
    assert theirs.state_dict() == state
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


def test_state_of_parameters_that_are_not_stepped_is_left_out_when_asked(tmp_path: Path) -> None:
    model = Small()
    optimizer = _single(model)
    _train(model, optimizer, None, range(2))
    save_checkpoint(tmp_path, "saved", model, optimizer)
    other = Small(1)
    load_checkpoint(tmp_path, "saved", other, _partial(other), strict=False)
    assert torch.equal(other.first.weight, model.first.weight)


def test_a_module_without_memory_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "saved", Small())
    with torch.device("meta"):
        model = Small()
    with pytest.raises(ValueError, match=r"first.weight is on the meta device: wrap the model, or give it memory"):
        load_checkpoint(tmp_path, "saved", model)
    model.to_empty(device="cpu")
    load_checkpoint(tmp_path, "saved", model)
    assert torch.equal(model.first.weight, Small().first.weight)
