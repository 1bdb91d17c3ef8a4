"""Partition of models that no trace at construction can follow: assumed then, verified by the first step."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.first_partition import first_partition
from nxdpp.pipeline.partition.partition import GivenCuts, Partition, PartitionPolicy, even
from nxdpp.tracing.graph.errors import TracingError
from tests.support.in_process import InProcessPipeline
from tests.support.models import llama, padded_batch
from tests.support.plain_models import WIDTH, Block
from tests.support.run_ranks import run_ranks
from tests.support.sized_models import (
    Convolution,
    DynamicImages,
    SkipNet,
    TakesAnyInputs,
    images,
    train_whole,
    vectors,
)
from tests.support.traced_models import options_for


def partition_of(
    model: nn.Module, layer: Any, batch: Any = None, policy: PartitionPolicy = even, names: Any = None
) -> Partition:
    return first_partition(model, options_for(model, layer), 3, policy, names, batch)


class DrawsUnlessGiven(nn.Module):
    """Noise between the layers, drawn where none is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor, eps: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        """Return a loss."""
        for number, layer in enumerate(self.layers):
            if number == 2:
                if eps is None:
                    eps = torch.randn_like(x)
                x = x + scale * eps
            x = layer(x)
        return x.square().mean()


def train_with_noise(rank: int, ranks: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    given: dict[str, Any] = {"num_microbatches": 2, "transformer_layer_cls": Block, "broadcast_and_average_loss": True}
    remedy = r"eps is an input of forward.* one microbatch: .*, partition_batch=\{\"x\": \.\.\., \"eps\": \.\.\.\}\)"
    with pytest.raises(TracingError, match=remedy):
        NxDPPModel(DrawsUnlessGiven(), **given)
    # The remedy, followed.
    x, eps = vectors(4)["x"], torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    model = NxDPPModel(DrawsUnlessGiven(), **given, partition_batch={"x": x[:2], "eps": eps[:2]})
    expected = DrawsUnlessGiven()(x, eps)
    torch.testing.assert_close(model.run_train(x=x, eps=eps), expected.detach())


def test_noise_that_each_step_gives_is_in_the_example() -> None:
    run_ranks(2, train_with_noise, 2)


def test_given_cuts_are_kept() -> None:
    for model in (DynamicImages(), TakesAnyInputs()):
        partition = partition_of(model, Block, policy=GivenCuts(["blocks.0", "blocks.2"]))
        assert partition.cuts == ["blocks.0", "blocks.2"]
        with pytest.raises(ValueError, match=r"pipeline_cuts"):
            partition_of(model, Block, policy=GivenCuts(["blocks.0", "blocks.9"]))


def after_the_first_layers(traced: Any, stages: int) -> list[str]:
    return [name for name in traced.layers if name in ("blocks.0", "blocks.1")]


def test_a_policy_that_reads_the_graph_needs_a_graph_of_the_model() -> None:
    assert partition_of(DynamicImages(), Block, policy=after_the_first_layers).cuts == ["blocks.0", "blocks.1"]
    with pytest.raises(ValueError, match=r"partition=after_the_first_layers reads the traced graph.*partition_batch"):
        partition_of(TakesAnyInputs(), Block, policy=after_the_first_layers)
    told = partition_of(TakesAnyInputs(), Block, vectors(2), after_the_first_layers)
    assert told.cuts == ["blocks.0", "blocks.1"]


class HeadFirst(TakesAnyInputs):
    """Registers its head first; the order is that of the code."""

    def __init__(self) -> None:
        super().__init__()
        modules = dict(self._modules)
        self._modules.clear()
        self._modules["head"] = modules.pop("head")
        self._modules.update(modules)


class LooksUpWidth(HeadFirst):
    """Code after the blocks fails for guessed sizes. The norms are a list without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden = self.norms[0](self.embedding(x) * self.scale)
        for block in self.blocks:
            hidden = block(hidden)
        divisor = {WIDTH: 2.0}[int(hidden.shape[-1])]
        return F.mse_loss(self.head(hidden) / divisor, y)


CASES: list[tuple[type[nn.Module], type[nn.Module], dict[str, torch.Tensor]]] = [
    (DynamicImages, Block, images(4)),
    (SkipNet, Convolution, images(4, 8, 8)),
    (HeadFirst, Block, vectors(4)),
    (LooksUpWidth, Block, vectors(4)),
]


@pytest.mark.parametrize(("make", "layer", "batch"), CASES)
def test_a_step_is_exact(make: type[nn.Module], layer: type[nn.Module], batch: dict[str, torch.Tensor]) -> None:
    model = make()
    whole = copy.deepcopy(model)
    losses = train_whole(whole, batch, 2)
    pipeline = InProcessPipeline(model, 2, transformer_layer_cls=layer)

    trained = pipeline.train(batch, 2)

    assert pipeline.partition.assumed
    assert all(map(torch.equal, trained, losses))
    # A skip is used on several stages, whose sums are in another order.
    near = 1e-6 if make is SkipNet else 0.0
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=0, atol=near, msg=name)
    for name, buffer in whole.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


def test_the_assumed_stages_are_those_of_a_given_batch() -> None:
    for make, layer, batch in CASES[:3]:
        told, assumed = partition_of(make(), layer, batch), partition_of(make(), layer)
        assert (told.assumed, assumed.assumed) == (False, True)
        assert assumed.layer_stages == told.layer_stages
        assert assumed.owners == told.owners


class NormOfManyRows(TakesAnyInputs):
    """Statistics that a trace with guesses does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x=self.norm(x) if x.shape[0] > 3 else x, y=y)


def test_statistics_that_belong_to_no_stage_are_refused_with_the_remedy() -> None:
    pipeline = InProcessPipeline(NormOfManyRows(), 2, transformer_layer_cls=Block)
    assert len(pipeline.train(vectors(4), 2)) == 2
    with pytest.raises(ValueError, match=r"change the buffers \['norm\..*, which belong to no stage.*\n.*partition_b"):
        pipeline.train(vectors(8), 2)
    pipeline = InProcessPipeline(NormOfManyRows(), 2, vectors(4), transformer_layer_cls=Block)
    assert len(pipeline.train(vectors(8), 2)) == 2


class BranchesOnData(DynamicImages):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.shape[2] % 4:
            x = x[:, :, :-1]
        if self.stem(x).sum() > 0:
            x = -x
        return super().forward(x, y)


def test_a_construct_that_no_shapes_make_traceable_is_refused_at_construction() -> None:
    with pytest.raises(TracingError, match="only the data tells"):
        partition_of(BranchesOnData(), Block)


class Weighted(type(llama())):  # type: ignore[misc]
    """A subclass whose forward has an input of its own, without a default."""

    def forward(self, input_ids: torch.Tensor, weights: torch.Tensor, labels: Any = None, **more: Any) -> Any:
        output = super().forward(input_ids=input_ids, labels=labels, **more)
        if weights.shape[0] > 1:
            output.loss = output.loss * weights.mean()
        return output


def test_an_input_of_a_subclass_is_exact() -> None:
    torch.manual_seed(0)
    model = Weighted(llama().config)
    whole = copy.deepcopy(model)
    whole.config.use_cache = False
    batch = {**padded_batch(4), "weights": torch.tensor([0.5, 1.0, 2.0, 0.25])}
    pipeline = InProcessPipeline(model, 2)
    losses = pipeline.train(batch, 1)
    loss = whole(**batch).loss
    loss.backward()
    assert torch.equal(losses[0], loss)
    for name, parameter in whole.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, parameter.grad), name
