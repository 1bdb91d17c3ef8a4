"""Trials tell which optimizers can step rows, and leave no traces."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn, optim
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, though not in its __all__
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers.optimization import Adafactor

from nxdpp.gradients.optimizer.partial_steps import _BY_ELEMENT, _BY_TENSOR, _refuse_wrong
from nxdpp.gradients.optimizer.trial_steps import repeats_steps, steps_quarters_alike, steps_tensors_alike
from tests.gradients.optimizer.optimizers import Lamb, LateLamb, Lion, Sam

ELEMENT, TENSOR, ALL = (True, True), (False, True), (False, False)
CASES: dict[str, tuple[Callable[[Any], Optimizer], tuple[bool, bool]]] = {
    "Lion": (Lion, ELEMENT),
    "fused": (lambda given: optim.AdamW(given, lr=torch.tensor(0.0), fused=True), ELEMENT),
    "Lamb": (Lamb, TENSOR),
    "LateLamb": (LateLamb, TENSOR),
    "Adafactor of transformers": (Adafactor, TENSOR),
    "LBFGS": (optim.LBFGS, ALL),
    "LBFGS with a line search": (lambda given: optim.LBFGS(given, line_search_fn="strong_wolfe"), ALL),
    "Sam": (lambda given: Sam(given, optim.AdamW, lr=0.1), ALL),
}
KNOWN = [each for each in _BY_ELEMENT if each is not optim.SparseAdam]
CASES |= {each.__name__: (each, ELEMENT) for each in KNOWN} | {each.__name__: (each, TENSOR) for each in _BY_TENSOR}


def made(make: Callable[[Any], Optimizer]) -> Optimizer:
    """An optimizer that has stepped once, or a LBFGS or Sam that has not."""
    parameters = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(4, 2))]
    optimizer = make(parameters)
    if not isinstance(optimizer, optim.LBFGS | Sam):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", CASES)
def test_what_a_step_looks_at(name: str) -> None:
    make, expected = CASES[name]
    optimizer = made(make)
    (group,) = optimizer.param_groups
    assert (steps_quarters_alike(optimizer, group), steps_tensors_alike(optimizer, group)) == expected
    assert repeats_steps(optimizer, group)


def test_nothing_of_the_program_changes() -> None:
    optimizer = made(optim.AdamW)
    optim.lr_scheduler.ConstantLR(optimizer)
    calls: list[Optimizer] = []
    optimizer.register_step_pre_hook(lambda *args: calls.append(args[0]))
    handle = register_optimizer_step_pre_hook(lambda *args: calls.append(args[0]))
    before, random = repr(optimizer.state_dict()), torch.get_rng_state()
    gradients = [parameter.grad for parameter in optimizer.param_groups[0]["params"]]
    try:
        assert steps_tensors_alike(optimizer, optimizer.param_groups[0])
        assert not calls
        optimizer.step()
        assert calls == [optimizer, optimizer]
    finally:
        handle.remove()
    assert repr(optimizer.state_dict()) != before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is g for p, g in zip(optimizer.param_groups[0]["params"], gradients, strict=True))


class Noisy(optim.SGD):
    """Adds noise to each element."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(torch.randn(parameter.shape))


def test_noise_is_told_from_a_look_at_others() -> None:
    optimizer = made(Noisy)
    assert not repeats_steps(optimizer, optimizer.param_groups[0])


class Averaging(optim.SGD):
    """Averages gradients over the ranks."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            dist.all_reduce(parameter.grad)


def test_a_trial_sends_nothing() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        optimizer = made(Averaging)
        with pytest.raises(RuntimeError, match="a step that sends messages is not tried"):
            steps_tensors_alike(optimizer, optimizer.param_groups[0])
    finally:
        dist.destroy_process_group()


class Unknown(optim.SGD):
    """Needs what a trial does not have."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise KeyError("layers.0")


def test_an_optimizer_of_accelerate_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It steps by the optimizer that it wraps, which is judged when that steps."""
    monkeypatch.delattr(AcceleratedOptimizer, "step")
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = object.__new__(AcceleratedOptimizer)
    optimizer.optimizer = optim.SGD([parameter], lr=0.1)
    _refuse_wrong(optimizer, {id(parameter)})
    # A trial would warn that it raises.
    assert not caplog.messages


def test_an_optimizer_that_no_trial_judges_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    for make in (Unknown, Unknown, Noisy, optim.SGD):
        parameter = nn.Parameter(torch.ones(2, 2))
        optimizer = make([parameter], lr=0.1)
        _refuse_wrong(optimizer, set())
        _refuse_wrong(optimizer, {id(parameter)})
    unknown, noisy = caplog.messages
    assert "Unknown steps a part of a model on each rank" in unknown
    assert "since it raises KeyError: 'layers.0'" in unknown
    assert "Noisy steps a part" in noisy
    assert "since it draws random numbers" in noisy
    assert "RMSprop, Rprop, SGD, SparseAdam" in unknown
