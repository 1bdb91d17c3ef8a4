"""Example inputs of the first trace: shapes and dtypes from the model's configuration."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from nxdpp.tracing.sizes.example_inputs import example_shapes, example_specs
from nxdpp.tracing.sizes.input_specs import InputSpec
from tests.support import wrapped_models as models
from tests.support.traced_models import make_model

TOKENS = InputSpec(2, torch.int64)


def test_images_have_the_size_of_the_configuration() -> None:
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, image_size=[32, 32],
        patch_size=16, num_channels=1,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    assert example_shapes(model, example_specs(model, None))["pixel_values"] == ((2, 1, 32, 32), torch.float32)


def test_shapes_and_names_come_from_a_given_batch() -> None:
    batch = {"x": torch.empty(3, 7, device="meta"), "weights": torch.empty(3, dtype=torch.float64, device="meta")}
    specs = example_specs(nn.Linear(7, 7), None, batch)
    assert specs == {"x": InputSpec(2, torch.float32), "weights": InputSpec(1, torch.float64)}
    assert example_shapes(nn.Linear(7, 7), specs, batch) == {
        "x": ((3, 7), torch.float32),
        "weights": ((3,), torch.float64),
    }


@pytest.mark.parametrize(
    ("make", "names", "specs"),
    [
        (lambda: make_model("llama", layers=2), None, {"input_ids": TOKENS, "labels": TOKENS}),
        (
            lambda: make_model("llama", layers=2),
            ["inputs_embeds", "attention_mask"],
            {"inputs_embeds": InputSpec(3, torch.float32), "attention_mask": TOKENS},
        ),
        (models.TwoTowers, None, {"input_ids": TOKENS, "pixel_values": InputSpec(4, torch.float32)}),
    ],
)
def test_the_inputs_of_the_first_trace(
    make: Callable[[], nn.Module], names: list[str] | None, specs: dict[str, InputSpec]
) -> None:
    assert dict(example_specs(make(), names)) == specs
