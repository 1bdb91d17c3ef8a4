"""Split backward of random graphs, compared with the full backward."""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.pipeline.backward.split_and_plain import compare

Step = tuple[str, int, int]


class Inverted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, y)
        return x @ y, y - x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ctx.saved_tensors
        first, second = gradients
        return first @ y.t() - second, x.t() @ first + second


def together(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, second = torch.cat([x, y]).tanh().chunk(2)
    return first * 2 - second


def overwritten(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x * 1.5
    z[1:] = y[1:] * 0.5
    z *= y
    return z


def inverted(x: torch.Tensor, y: torch.Tensor) -> Any:
    first, second = Inverted.apply(x, y)  # type: ignore[no-untyped-call]
    return first - second.tanh()


OPERATIONS: dict[str, Any] = {
    "mm": lambda x, y: torch.mm(x, y).tanh(),
    "add": torch.add,
    "mul": torch.mul,
    "addmm": lambda x, y: torch.addmm(x, x, y).tanh(),
    "tanh": lambda x, y: x.tanh(),
    "turn": lambda x, y: x.t() * 1.5,
    "view": lambda x, y: x.reshape(2, 8).sin().view(4, 4),
    "norm": lambda x, y: nn.functional.layer_norm(x, (4,), y[0], y[1]),
    "softmax": lambda x, y: x.softmax(-1) + y.detach(),
    "together": together,
    "overwritten": overwritten,
    "inverted": inverted,
    "attention": lambda x, y: nn.functional.scaled_dot_product_attention(x[None], y[None], x[None])[0],
}
PARAMETERS = 4


class Program(nn.Module):
    """Random operations, each on two earlier values. The first values are inputs and parameters."""

    def __init__(self, programs: Sequence[Sequence[Step]], outputs: Sequence[int]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterList(torch.randn(4, 4, generator=generator) for _ in range(PARAMETERS))
        self.programs, self.outputs = programs, outputs

    def forward(self, which: torch.Tensor, *received: torch.Tensor) -> list[torch.Tensor]:
        values = [*received, *self.weights]
        for name, first, second in self.programs[int(which) % len(self.programs)]:
            values.append(OPERATIONS[name](values[first % len(values)], values[-1 - second % len(values)]))
        return [values[-1 - output % len(values)] for output in self.outputs]


steps = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 15), st.integers(0, 15))


@settings(max_examples=50, deadline=None)
@given(
    programs=st.lists(st.lists(steps, max_size=10), min_size=1, max_size=2),
    outputs=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    frozen=st.sets(st.integers(0, PARAMETERS - 1)),
    delay=st.integers(0, 3),
)
def test_random_graphs(programs: list[list[Step]], outputs: list[int], frozen: set[int], delay: int) -> None:
    module = Program(programs, outputs)
    for number in frozen:
        module.weights[number].requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    batches = [
        [torch.tensor(number), *(torch.randn(4, 4, generator=generator) for _ in range(2))] for number in (0, 0, 1, 0)
    ]
    # With two graphs, a gradient that only one of them can delay is summed in the order of the calls.
    compare(module, batches, delay=delay if len(programs) == 1 else 0)
