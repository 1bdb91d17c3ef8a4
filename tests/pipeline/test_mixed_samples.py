"""Microbatches of one step with different shapes and graphs: exact, over ranks and schedules."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nxdpp import NxDPPModel, parallel_state
from nxdpp.schedules.families.registry import FAMILIES
from tests.pipeline.in_turn import run_in_turn
from tests.pipeline.runtime.scheduled_models import Chain
from tests.pipeline.test_samples import assert_trains_alike
from tests.support.models import make, padded_batch
from tests.support.nccl_rules import use_nccl_rules, wait_for_each_message
from tests.support.plain_models import WIDTH
from tests.support.run_ranks import run_ranks

LENGTHS = (3, 5, 3, 2, 5, 5, 1)
FIRST = True, False


class Skipping(Chain):
    """Later layers use early values, and the sizes of an early one; the output has one part of the sample's length."""

    def forward(self, x: Tensor) -> Any:
        first = self.blocks[0](self.embedding(x))
        hidden = self.blocks[1](first)
        for block in self.blocks[2:]:
            hidden = block(hidden * first)
        loss = self.head(hidden).square().sum() / first.shape[1]
        return loss, hidden.sum(dim=-1), torch.ones_like(first)


def of_lengths(lengths: Sequence[int]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(2, length, WIDTH, generator=generator)} for length in lengths]


def make_skipping(layers: int = 4) -> Skipping:
    torch.manual_seed(0)
    return Skipping(layers)


class Optional(Chain):
    """Rows may have an image, whose features go to the first and to the last layer: a boundary more, with them."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.encoder = torch.nn.Linear(3, WIDTH)

    def forward(self, x: Tensor, image: Tensor | None = None, scale: str = "none") -> Any:
        features = None if image is None else self.encoder(image).unsqueeze(1)
        hidden = self.embedding(x)
        if features is not None:
            hidden = hidden + features
        for block in self.blocks[:-1]:
            hidden = block(hidden)
        last = hidden if features is None else hidden * features
        hidden = self.blocks[-1](last)
        loss = self.head(hidden).square().mean()
        return loss * 2 if scale == "double" else loss, hidden


class Asks(Chain):
    """Has two graphs: for short samples and for long ones."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * 2 if x.shape[1] > 3 else x)


def make_optional(layers: int = 4) -> Optional:
    torch.manual_seed(0)
    return Optional(layers)


def mixed(forms: str, seed: int = 0) -> list[dict[str, Any]]:
    """A sample for each letter: ``t`` text, ``l`` a longer one, ``i`` with an image, ``d`` with another option."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for form in forms:
        sample: dict[str, Any] = {"x": torch.randn(2, 5 if form == "l" else 3, WIDTH, generator=generator)}
        if form == "i":
            sample["image"] = torch.randn(2, 3, generator=generator)
        made.append(sample | ({"scale": "double"} if form == "d" else {}))
    return made


def test_samples_of_different_lengths_and_graphs_are_exact(one_rank: None) -> None:
    settings: dict[str, Any] = {"gradient_reduction": "sum", "check_against_module": "first"}
    assert_trains_alike(make_skipping, of_lengths(LENGTHS), None, virtual_pipeline_size=2, **settings)
    torch.manual_seed(0)
    assert_trains_alike(lambda: Asks(4), of_lengths((3, 4, 2, 6)), virtual_pipeline_size=2)

    def sample(rows: int, length: int) -> dict[str, Tensor]:
        return {name: value[:, :length] for name, value in padded_batch(rows).items()}

    given = [sample(2, 8), sample(1, 5), sample(3, 6)]
    assert_trains_alike(lambda: make("llama", layers=2, use_cache=False), given, virtual_pipeline_size=2)


def over_ranks(rank: int, ranks: int, families: Sequence[str], has_nccl_rules: bool) -> None:
    if has_nccl_rules:
        use_nccl_rules()
        wait_for_each_message()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    for name in families:
        chunks = FAMILIES[name].default_chunks
        layers = max(3, ranks * chunks)
        settings: dict[str, Any] = {"schedule": name, "virtual_pipeline_size": chunks}
        assert_trains_alike(
            partial(make_skipping, layers),
            of_lengths(LENGTHS),
            lambda number, loss: loss * (number != 2),
            deallocate_pipeline_outputs=name == "1f1b",
            **settings,
        )
        assert_trains_alike(partial(make_optional, layers), mixed("titldiit"), **settings)


def test_different_shapes_are_exact_over_ranks() -> None:
    """With tags, and then by the order of the messages alone."""
    run_in_turn(2, (over_ranks, 2, ("1f1b",), False), (over_ranks, 2, ("zb-v",), True))


@pytest.mark.sweep
@pytest.mark.parametrize("has_nccl_rules", [False, True])
def test_every_family_takes_different_shapes(has_nccl_rules: bool) -> None:
    run_ranks(4, over_ranks, 4, tuple(FAMILIES), has_nccl_rules)


def other_graphs(rank: int) -> None:
    """Rank 1 has an image in another microbatch."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    pipeline = NxDPPModel(make_optional(), num_microbatches=2, output_loss_value_spec=FIRST)
    pipeline.steps.train_microbatches(mixed("it" if rank else "ti"))


def test_ranks_with_other_graphs_are_told_before_the_step() -> None:
    with pytest.raises(AssertionError, match=r"rank 1\): graph 0: any stage: image = placeholder image"):
        run_ranks(2, other_graphs)
