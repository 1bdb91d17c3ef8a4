"""Microbatches of one step with different shapes and graphs: exact, over ranks, replicas and schedules."""

from collections.abc import Callable, Sequence
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


def split(inputs: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Rows of an image that is not zero have it, and others have none; an odd microbatch is longer by a row."""
    rows = len(inputs["x"])
    sizes = [rows // count + (1 if number % 2 else -1) for number in range(count)]
    parts = [
        {"x": x, "image": image}
        for x, image in zip(inputs["x"].split(sizes), inputs["image"].split(sizes), strict=True)
    ]
    return [part if part["image"].any() else {"x": part["x"]} for part in parts]


def trained(step: Callable[..., Any], parameters: Any, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        losses.append(step(number))
        optimizer.step()
    return losses


def batch_of(number: int, replica: int) -> dict[str, Tensor]:
    """Eight rows; which of them have images changes from step to step, and from replica to replica."""
    generator = torch.Generator().manual_seed(10 * number + replica)
    image = torch.randn(8, 3, generator=generator)
    has_image = [number % 2 == 0, replica == 0, number == 1, replica == 1 and number == 2]
    for microbatch, (start, stop) in enumerate(((0, 1), (1, 4), (4, 5), (5, 8))):
        image[start:stop] *= has_image[microbatch]
    return {"x": torch.randn(8, 3, WIDTH, generator=generator), "image": image}


def with_replicas(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    replicas, replica = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    model = NxDPPModel(
        make_optional(),
        num_microbatches=4,
        split_inputs_fn=split,
        output_loss_value_spec=FIRST,
        broadcast_and_average_loss=True,
    )
    ours = trained(lambda number: float(model.run_train(**batch_of(number, replica))), model.parameters(), 4)
    whole = make_optional()

    def step(number: int) -> float:
        parts = [part for each in range(replicas) for part in split(batch_of(number, each), 4)]
        loss = torch.stack([whole(**part)[0] for part in parts]).mean()
        loss.backward()
        return float(loss.detach())

    theirs = trained(step, whole.parameters(), 4)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter, whole.get_parameter(name), rtol=1e-5, atol=1e-6)
    model.eval()
    whole.eval()
    expected = [whole(**part)[0] for each in range(replicas) for part in split(batch_of(0, each), 4)]
    torch.testing.assert_close(model.run_eval(**batch_of(0, replica)), torch.stack(expected).mean(), rtol=1e-6, atol=0)


def test_split_inputs_may_differ_in_names_and_rows() -> None:
    run_ranks(4, with_replicas)


def other_graphs(rank: int) -> None:
    """Rank 1 has an image in another microbatch."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    pipeline = NxDPPModel(make_optional(), num_microbatches=2, output_loss_value_spec=FIRST)
    pipeline.steps.train_microbatches(mixed("it" if rank else "ti"))


def test_ranks_with_other_graphs_are_told_before_the_step() -> None:
    with pytest.raises(AssertionError, match=r"rank 1\): graph 0: any stage: image = placeholder image"):
        run_ranks(2, other_graphs)
