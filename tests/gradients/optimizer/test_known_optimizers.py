"""The table of known optimizers has what their steps look at, and subclasses are told from it."""

from collections.abc import Sequence
from typing import Any

import bitsandbytes.optim as bitsandbytes_optim
import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer
from transformers.optimization import Adafactor

from nxdpp.gradients.optimizer.known_optimizers import Unknown, looked_at
from tests.gradients.optimizer.optimizers import Lion

PUBLIC = [
    each
    for package in (optim, bitsandbytes_optim)
    for each in vars(package).values()
    if isinstance(each, type) and issubclass(each, Optimizer) and each is not Optimizer
]
# One steps sparse gradients only, and bitsandbytes has no step of the others on the CPU.
WITHOUT_TRIAL = (optim.SparseAdam, bitsandbytes_optim.AdEMAMix32bit, bitsandbytes_optim.PagedAdEMAMix32bit)
CLASSES = [*(each for each in PUBLIC if each not in WITHOUT_TRIAL), Adafactor]
# A tensor of bitsandbytes has states of 8 bits from 4,096 elements on.
WHOLE = torch.linspace(-2, 2, 64 * 128).view(64, 128)
OTHER = torch.linspace(1, 3, 15).view(5, 3)
QUARTERS = [part for half in WHOLE.split(32) for part in half.split(64, 1)]
# Gradients are at first small, then sudden, then gone, then as large as their average.
GRADIENTS = ((1e-3, 9), (1.0, 9), (1e4, 9), (0.0, 9), (900.0, 5))


def looks(optimizer: Optimizer) -> str | Unknown:
    found = {looked_at(optimizer, group) for group in optimizer.param_groups}
    (only,) = found
    return only


def made(kind: Any, tensors: Sequence[torch.Tensor]) -> tuple[Any, list[nn.Parameter]]:
    parameters = [nn.Parameter(each.clone()) for each in tensors]
    needed: dict[str, Any] = {"momentum": 0.9} if kind.__name__.startswith(("SGD", "LARS", "PytorchLARS")) else {}
    needed |= {"relative_step": False} if kind is Adafactor else {}
    return kind(parameters, lr=1e-2, **needed), parameters


def stepped(kind: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return where steps with gradients of all sizes take the tensors that start so."""
    optimizer, parameters = made(kind, tensors)
    for scale, waves in GRADIENTS:

        def closure(scale: float = scale, waves: int = waves) -> torch.Tensor:
            for start, parameter in zip(tensors, parameters, strict=True):
                parameter.grad = scale * (torch.cos(waves * start) + 0.5 * parameter.detach())
            return torch.stack([parameter.detach().square().sum() for parameter in parameters]).sum()

        if kind.__module__.startswith("bitsandbytes"):
            # It leaves gradients out of the step of a closure.
            closure()
            optimizer.step()
        else:
            optimizer.step(torch.no_grad()(closure))
    return [parameter.detach() for parameter in parameters]


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)


def shown(kind: Any) -> str:
    """Return what a step looks at by the steps of a matrix as a whole, by its quarters, and beside another one."""
    (whole,) = stepped(kind, [WHOLE])
    beside, _ = stepped(kind, [WHOLE, OTHER])
    if not is_same(whole, beside):
        return "all"
    first, second, third, fourth = (stepped(kind, [each])[0] for each in QUARTERS)
    parts = torch.cat([torch.cat([first, second], 1), torch.cat([third, fourth], 1)])
    return "element" if is_same(whole, parts) else "tensor"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: f"{kind.__module__.partition('.')[0]} {kind.__name__}")
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_a_class_is_known_by_what_its_steps_show(kind: Any) -> None:
    optimizer, _ = made(kind, [WHOLE])
    assert looks(optimizer) == shown(kind)


def of_package(module: str, name: str) -> Any:
    """A class as a package that is not installed here has it, with all options in its groups."""

    def __init__(self: Any, params: Any, **options: Any) -> None:
        Optimizer.__init__(self, params, {"lr": 1e-2, **options})

    return type(name, (Optimizer,), {"__module__": module, "__init__": __init__})


@pytest.mark.parametrize(
    ("module", "name", "options", "expected"),
    [
        ("timm.optim.lion", "Lion", {}, "element"),
        ("timm.optim.lion", "Lion", {"caution": True}, "tensor"),
        ("timm.optim.lamb", "Lamb", {"max_grad_norm": 1.0}, "all"),
        ("pytorch_optimizer.optimizer.adan", "Adan", {"max_grad_norm": 1.0}, "all"),
        ("pytorch_optimizer.optimizer.muon.distributed_muon", "DistributedMuon", {}, "messages"),
    ],
)
def test_options_by_which_a_step_looks_at_more(module: str, name: str, options: Any, expected: str) -> None:
    assert looks(of_package(module, name)([nn.Parameter(torch.ones(2))], **options)) == expected


class Renamed(optim.AdamW):
    """Overrides nothing of a step."""

    def __init__(self, params: Any, warmup: int = 3) -> None:
        super().__init__(params, lr=0.1)
        self.warmup = warmup

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "warmup": self.warmup}

    def warmed(self) -> bool:
        return self.warmup == 0


class Stepping(Renamed):
    """Overrides ``step``."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Mixin:
    """Comes before the known class."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)  # type: ignore[misc]  # of the optimizer


class Mixed(Mixin, optim.Adam):
    """Has no step of its own."""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Renamed, "element"),
        (Stepping, Unknown("overrides step() of AdamW")),
        (Mixed, Unknown("overrides step() of Adam")),
        (Lion, Unknown("is not known")),
    ],
)
def test_a_subclass_is_like_its_class_unless_it_overrides_a_step(kind: Any, expected: str | Unknown) -> None:
    # torch puts a function with hooks around the step of a class at its first instance.
    for _ in range(2):
        assert looks(kind([nn.Parameter(torch.ones(2))])) == expected
