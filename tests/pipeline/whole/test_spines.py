"""Spines as people write them: losses and gradients of the stages are those of one process, to the last bit."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import einops
import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.support.exact import assert_exact
from tests.support.plain_models import WIDTH, Base

X = torch.linspace(-1, 1, 4 * 6 * WIDTH).reshape(4, 6, WIDTH)
Forward = Callable[["Spine", Tensor], Any]


class Spine(Base):
    """Blocks around which ``spine`` is the forward."""

    weight: Tensor

    def __init__(self, spine: Forward) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.spine = spine
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("weight", torch.linspace(1, 2, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.spine(self, x)

    def hidden(self, x: Tensor) -> Tensor:
        """Hidden states after all blocks, of the shape of ``x``."""
        hidden: Tensor = self.through(self.blocks, self.embedding(x))
        return hidden


def _ignores_an_index(self: Spine, x: Tensor) -> Tensor:
    # As the heads of transformers for question answering do.
    logits = self.head(self.hidden(x)).squeeze(-1)
    positions = x[:, 0, 0].abs().mul(9).long().clamp(0, logits.size(1))
    loss: Tensor = nn.CrossEntropyLoss(ignore_index=logits.size(1))(logits, positions)
    return loss


def test_a_module_made_in_forward_holds_traced_values() -> None:
    assert_exact(Spine(_ignores_an_index), {"x": X}, "Block")


Number = Callable[[Tensor, int], Any]
# Of a tensor (B, T, C) and its T, which is 6.
NUMBERS: dict[str, Number] = {
    "square root": lambda x, n: int(n**0.5),
    "math": lambda x, n: int(math.sqrt(n)) + math.floor(n / 4) + math.ceil(n / 4) + math.trunc(n / 4) + math.gcd(n, 4),
    "numpy": lambda x, n: int(numpy.sqrt(n)) + numpy.log(n) + numpy.prod(x.shape),
    "divmod": lambda x, n: divmod(n, 4)[1] + divmod(20, n)[0] + pow(n, 2) + abs(n - 9),
    "extremes": lambda x, n: max(n, 4) + min(n, 4) + sum(x.shape) + sorted(x.shape)[0] + max([n, 3], key=lambda m: -m),
    "key": lambda x, n: {6: 2.0, 5: 3.0}[n] + {6: 2.0}.get(n, 1.0) + {(2, 6): 5.0}.get((2, x.shape[1]), 1.0),
    "member": lambda x, n: (2 if n in (1, 6) else 3) * (5 if n in {6, 7} else 7) * (2 if n in range(3, 9) else 3),
    "remainder": lambda x, n: 2 if n % 2 == 0 and 3 < n < 9 and hash(n) == 6 else 3,
    "product": lambda x, n: functools.reduce(operator.mul, x.shape) + math.prod(x.shape[1:]) + x.shape.numel(),
}


NUMBERS_OF_A_SPINE = [list(NUMBERS.values())[::2], list(NUMBERS.values())[1::2]]


@pytest.mark.parametrize("numbers", NUMBERS_OF_A_SPINE, ids=["first", "second"])
def test_sizes_are_numbers_for_python(numbers: list[Number]) -> None:
    def spine(self: Spine, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        result: Tensor = hidden.square().mean()
        for number in numbers:
            result = result * number(x, x.shape[1]) * number(hidden, hidden.size(1))
        return result

    pipeline = assert_exact(Spine(spine), {"x": X}, "Block")
    # Other sizes have a graph of their own where the number differs.
    (loss, _) = pipeline.train({"x": X[:, :5]}, 2)
    assert torch.equal(loss, Spine(spine).eval()(X[:2, :5]))


def _rearranges(self: Spine, x: Tensor) -> Tensor:
    heads = einops.rearrange(self.hidden(x), "b t (h d) -> b h t d", h=2)
    joined = einops.rearrange(heads, "b h t d -> b t (h d)")
    mean = einops.reduce(joined, "b t d -> b d", "mean")
    result: Tensor = (joined + einops.repeat(mean, "b d -> b t d", t=joined.shape[1])).square().mean()
    return result


def test_einops() -> None:
    assert_exact(Spine(_rearranges), {"x": X}, "Block")


# Of hidden states, asked by code of this module and of another one, in which ``isinstance`` is Python's own.
QUESTIONS: dict[str, Callable[[Any], bool]] = {
    "tensor": lambda x: isinstance(x, Tensor),
    "shape": lambda x: isinstance(x.shape, tuple) and not isinstance(x.shape, list),
    "size": lambda x: isinstance(x.size(-1), int) and not isinstance(x.size(-1), float),
    "parameter": lambda x: isinstance(x, nn.Parameter),
    "equal shapes": lambda x: x.shape == (2, 6, WIDTH) and x.shape[-2:] == (6, WIDTH),
    "dtype": lambda x: x.dtype.is_floating_point and x.is_floating_point() and torch.is_floating_point(x),
    "strides": lambda x: x.stride() == (6 * WIDTH, WIDTH, 1) and x.element_size() == 4,
    "gradient": lambda x: x.requires_grad,
    "compiling": lambda x: torch.compiler.is_compiling(),
}


def _asking(asks: Sequence[Callable[[Any], bool]]) -> Callable[[Spine, Tensor], Tensor]:
    def spine(self: Spine, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        result: Tensor = hidden.square().mean()
        for ask in asks:
            result = result * (2 if ask(hidden) else 3) * (5 if ask(self.scale) else 7) * (11 if ask(x) else 13)
        return result

    return spine


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_traced_value_answers_as_the_value(elsewhere: bool) -> None:
    space: dict[str, Any] = {"__name__": "elsewhere", "WIDTH": WIDTH, "torch": torch}
    asks = [FunctionType(each.__code__, {**globals(), **space}) if elsewhere else each for each in QUESTIONS.values()]
    for part in (asks[::2], asks[1::2]):
        assert_exact(Spine(_asking(part)), {"x": X}, "Block")
