"""Partition of models that no trace at construction can follow: assumed then, verified by the first step."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.first_partition import first_partition
from nxdpp.pipeline.partition.partition import Partition, PartitionPolicy, even
from nxdpp.tracing.graph.errors import TracingError
from tests.support.in_process import InProcessPipeline
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


class LooksUpWidth(TakesAnyInputs):
    """Code after the blocks fails for guessed sizes. The norms are a list without layers; the head comes first."""

    def __init__(self) -> None:
        super().__init__()
        modules = dict(self._modules)
        self._modules.clear()
        self._modules.update({"head": modules.pop("head"), **modules})
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
    for make, layer, batch in CASES[:2]:
        told, assumed = partition_of(make(), layer, batch), partition_of(make(), layer)
        assert (told.assumed, assumed.assumed) == (False, True)
        assert assumed.layer_stages == told.layer_stages
        assert assumed.owners == told.owners
