"""Microbatches of one step that need different graphs: exact, over ranks, replicas and schedules."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nxdpp import NxDPPModel, parallel_state
from nxdpp.schedules.families.registry import FAMILIES
from tests.pipeline.runtime.scheduled_models import Chain
from tests.pipeline.test_mixed_samples import of_lengths
from tests.pipeline.test_samples import assert_trains_alike, one_rank  # noqa: F401  # a fixture
from tests.support.nccl_rules import use_nccl_rules, wait_for_each_message
from tests.support.plain_models import WIDTH
from tests.support.run_ranks import run_ranks

FIRST = True, False


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


def test_a_size_of_which_code_asks_gives_each_sample_its_graph(one_rank: None) -> None:  # noqa: F811
    torch.manual_seed(0)
    assert_trains_alike(lambda: Asks(4), of_lengths((3, 4, 2, 6)), virtual_pipeline_size=2)


def over_ranks(rank: int, ranks: int, families: Sequence[str], has_nccl_rules: bool) -> None:
    if has_nccl_rules:
        use_nccl_rules()
        wait_for_each_message()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    for name in families:
        chunks = FAMILIES[name].default_chunks
        assert_trains_alike(
            lambda stages=ranks * chunks: make_optional(max(3, stages)),  # type: ignore[misc]
            mixed("titldiit"),
            schedule=name,
            virtual_pipeline_size=chunks,
            deallocate_pipeline_outputs=name == "1f1b",
        )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_optional_inputs_of_some_samples_are_exact_over_ranks(ranks: int) -> None:
    run_ranks(ranks, over_ranks, ranks, ("1f1b", "interleaved", "zb-v"), False)


def test_several_graphs_need_no_tags() -> None:
    run_ranks(2, over_ranks, 2, ("interleaved", "zb-v"), True)


@pytest.mark.sweep
@pytest.mark.parametrize("has_nccl_rules", [False, True])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_every_family_takes_several_graphs(ranks: int, has_nccl_rules: bool) -> None:
    run_ranks(ranks, over_ranks, ranks, tuple(FAMILIES), has_nccl_rules, timeout=300.0)


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


def with_replicas(rank: int, stages: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
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


@pytest.mark.parametrize(("ranks", "stages"), [(2, 2), (4, 2), (4, 4)])
def test_split_inputs_may_differ_in_names_and_rows(ranks: int, stages: int) -> None:
    run_ranks(ranks, with_replicas, stages)


def test_one_process_takes_them_too_and_the_first_step_can_be_compared(one_rank: None) -> None:  # noqa: F811
    model = make_optional()
    whole = copy.deepcopy(model)
    pipeline = NxDPPModel(
        model, None, 4, virtual_pipeline_size=2, output_loss_value_spec=FIRST, check_against_module="first"
    )
    losses = pipeline.steps.train_microbatches(mixed("tiid"))
    assert losses == [whole(**each)[0] for each in mixed("tiid")]
    # Another number of microbatches, and another order.
    losses = pipeline.steps.train_microbatches(mixed("itl", 1))
    assert losses == [whole(**each)[0] for each in mixed("itl", 1)]


def other_graphs(rank: int, ranks: int, other: int) -> None:
    """Rank ``other`` has an image in another microbatch."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    pipeline = NxDPPModel(make_optional(), num_microbatches=2, output_loss_value_spec=FIRST)
    pipeline.steps.train_microbatches(mixed("it" if rank == other else "ti"))


@pytest.mark.parametrize(("ranks", "other"), [(2, 1), (4, 2)])
def test_ranks_with_other_graphs_are_told_before_the_step(ranks: int, other: int) -> None:
    with pytest.raises(AssertionError, match=rf"rank {other}\): graph 0: any stage: image = placeholder image"):
        run_ranks(ranks, other_graphs, ranks, other)
