"""Values that the loss does not depend on: parameters before them have no gradient, as in one process."""

import copy

import torch

from nxdpp import parallel_state
from nxdpp.schedules.families.registry import FAMILIES
from tests.pipeline.runtime.scheduled_models import Chain, copy_of, make, train_both, wrap
from tests.support.models import gradient_differences
from tests.support.plain_models import Block
from tests.support.run_ranks import run_ranks


class Detached(Chain):
    """The layers before the middle get no gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden.detach() if number == len(self.blocks) // 2 else hidden)
        return self.head(hidden).square().mean()  # type: ignore[no-any-return]


class OnOnePath(Chain):
    """The first value is detached on the way to the second layer, and used by the last one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](self.embedding(x))
        hidden = self.blocks[1](first.detach())
        for block in self.blocks[2:-1]:
            hidden = block(hidden)
        hidden = self.blocks[-1](hidden.detach() + first)
        return self.head(hidden).square().mean()  # type: ignore[no-any-return]


class TiedBefore(Detached):
    """Two layers before the detached value share a weight over a boundary."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        first, second = self.blocks[0], self.blocks[layers // 2 - 1]
        assert isinstance(first, Block)
        assert isinstance(second, Block)
        second.linear.weight = first.linear.weight


class Switched(Block):
    """A layer that detaches its input while ``ends`` is set."""

    ends = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.detach() if self.ends else hidden)


class EndsInSomeSteps(Chain):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.blocks[layers // 2] = Switched()

    def set_ends(self, ends: bool) -> None:
        for block in self.blocks:
            if isinstance(block, Switched):
                block.ends = ends


def check(kind: type[Chain], ranks: int, schedule: str) -> None:
    layers = 2 * ranks * FAMILIES[schedule].default_chunks
    model = make(kind, layers)
    whole = copy_of(model)
    wrapped = wrap(model, 3, schedule=schedule)
    for step in range(2):
        train_both(wrapped, whole, 3, step)
        differences = gradient_differences(wrapped, whole)
        assert not differences, (kind.__name__, schedule, step, differences)
    assert any(parameter.grad is None for parameter in whole.parameters())


def every_family(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    for schedule in FAMILIES:
        check(OnOnePath, 2, schedule)
    for schedule in ("1f1b", "zb-v"):
        check(Detached, 2, schedule)
    check(TiedBefore, 2, "interleaved")
    changing()


def changing() -> None:
    """Compare steps of which some have no gradient at the boundary, in all or in some microbatches."""
    patterns = [[True, False, True], [False, True, False]]
    # On a device the sender refuses a step that has none after one that had.
    for pattern in patterns if parallel_state.local_device().type == "cpu" else patterns[:1]:
        model = EndsInSomeSteps(4)
        whole = copy.deepcopy(model)
        wrapped = wrap(model, 2)
        for step, ends in enumerate(pattern):
            model.set_ends(ends)
            whole.set_ends(ends)
            wrapped.local_module.zero_grad()
            whole.zero_grad()
            train_both(wrapped, whole, 2, step)
            differences = gradient_differences(wrapped, whole)
            assert not differences, (pattern, step, differences)
            assert ends == any(parameter.grad is None for parameter in whole.parameters())


def test_every_family() -> None:
    run_ranks(2, every_family)
