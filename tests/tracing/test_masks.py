"""``create_masks_for_generate`` is traced to a dictionary in which each mask is a node."""

from typing import Any

import pytest
import torch
from torch import fx
from transformers import Gemma2Config, LlamaConfig, PreTrainedConfig, masking_utils

from nxdpp.tracing.calls import OpaqueCall
from nxdpp.tracing.huggingface import recorded_masks
from nxdpp.tracing.uses import draws_random_numbers, metadata_arguments

ROOT = torch.nn.Module()


def masks_of(config: PreTrainedConfig, embeds: Any) -> Any:
    return masking_utils.create_masks_for_generate(config, embeds, None, None)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (Gemma2Config(layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2), 2),
        (Gemma2Config(layer_types=["indexed_attention"], num_hidden_layers=1), 1),
        (Gemma2Config(layer_types=["hybrid"], num_hidden_layers=1), 2),
        (LlamaConfig(), None),
    ],
)
def test_the_graph_makes_the_masks_of_the_model(config: PreTrainedConfig, count: int | None) -> None:
    config._attn_implementation = "eager"
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    embeds = tracer.create_proxy("placeholder", "embeds", (), {})
    with recorded_masks():
        made = masks_of(config, embeds)
    masks = made if isinstance(made, dict) else {"": made}
    assert count is None or len(masks) == count
    assert list(masks) == sorted(masks)
    for proxy in masks.values():
        assert isinstance(proxy.node.target, OpaqueCall)
        assert metadata_arguments(proxy.node, ROOT) == {embeds.node}
        assert not draws_random_numbers(proxy.node, ROOT)

    graph.output({name: proxy.node for name, proxy in masks.items()})
    values = fx.GraphModule({}, graph)(torch.zeros(2, 12, 8))
    expected = masks_of(config, torch.zeros(2, 12, 8))
    for name, value in (expected if isinstance(expected, dict) else {"": expected}).items():
        assert value is values[name] is None or torch.equal(values[name], value)


def test_the_functions_are_transformers_own_afterwards() -> None:
    before = dict(vars(masking_utils)), dict(masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING)
    with recorded_masks():
        pass
    assert (dict(vars(masking_utils)), dict(masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING)) == before
