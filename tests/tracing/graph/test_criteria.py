"""Losses of segmenters, which match objects by data: NumPy and SciPy choose the pairs."""

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.support.exact import assert_exact
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, run_graph, trace_with

SIDE = 32


class _Segmentation(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, class_labels: Tensor, mask_labels: Tensor) -> Tensor:
        output = self.model(pixel_values, class_labels=list(class_labels), mask_labels=list(mask_labels))
        loss: Tensor = output.loss
        return loss


def _inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(2, 3, SIDE, SIDE, generator=generator),
        "class_labels": torch.randint(2, (2, 2), generator=generator),
        "mask_labels": (torch.rand(2, 2, SIDE, SIDE, generator=generator) < 0.5).float(),
    }


def test_a_static_method_that_may_draw_random_numbers_is_one_node() -> None:
    pytest.importorskip("scipy")
    # EoMT asks a probability whether to draw. Its classes and masks have a loss after each block.
    config = transformers.EomtConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_blocks=2,
        image_size=SIDE,
        patch_size=8,
        num_queries=4,
        num_upscale_blocks=1,
        train_num_points=16,
    )
    torch.manual_seed(0)
    segmenter = transformers.EomtForUniversalSegmentation(config)
    segmenter.attn_mask_probs.fill_(0.5)
    model = _Segmentation(segmenter).train()

    traced = trace_with(model, _inputs())

    assert sum("disable_attention_mask" in node.name for node in traced.graph.nodes) == 2
    torch.manual_seed(1)
    expected = model(**_inputs())
    torch.manual_seed(1)
    assert torch.equal(run_graph(model, traced, _inputs()), expected)


class _Criterion(nn.Module):
    def __init__(self, fills: bool) -> None:
        super().__init__()
        self.fills = fills

    def forward(self, x: Tensor, others: list[Tensor]) -> Tensor:
        if self.fills:
            others.append(x)
        return sum((other.mean() for other in others), x.square().mean())


class _WithEmptyList(nn.Module):
    def __init__(self, fills: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PlainLayer() for _ in range(2))
        self.criterion = _Criterion(fills)

    def forward(self, x: Tensor) -> Tensor:
        others: list[Tensor] = []
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.criterion(x, others)
        return loss


def test_a_criterion_may_read_an_empty_list() -> None:
    torch.manual_seed(0)
    assert_exact(_WithEmptyList(False), {"x": torch.randn(4, 4)}, layer_class=PlainLayer)


def test_a_criterion_that_fills_an_empty_list_is_refused_in_the_step() -> None:
    pipeline = InProcessPipeline(_WithEmptyList(True), 2, {"x": torch.randn(2, 4)}, transformer_layer_cls=PlainLayer)

    with pytest.raises(RuntimeError, match="a module fills a list that it is given"):
        pipeline.train({"x": torch.randn(4, 4)}, 2)
