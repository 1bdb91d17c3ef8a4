"""A mask that may be ``None`` when the graph runs: what is taken of it, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask

from nxdpp.tracing.input_specs import InputSpec
from nxdpp.tracing.opaque import recorded
from nxdpp.tracing.trace import TracingOptions, trace
from tests.support.traced_models import run_graph

CONFIG = LlamaConfig(num_hidden_layers=1)
CONFIG._attn_implementation = "sdpa"
EVERYTHING = slice(0, None)


class Masked(nn.Module):
    """Says in its output whether there is a mask, and gives what ``use`` makes of it."""

    def __init__(self, use: Callable[[Any], Any]) -> None:
        super().__init__()
        self.use = use
        self.layers = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: Tensor, attention_mask: Tensor) -> Any:
        mask = recorded(create_causal_mask)(CONFIG, x, attention_mask, None)
        return self.layers[0](x).sum(), self.use(mask)


def in_one_line(mask: Any) -> Any:
    return mask[:, :, EVERYTHING, :] if mask is not None else None


def in_a_comprehension(mask: Any) -> Any:
    return {k: v[:, EVERYTHING] if v is not None else None for k, v in {"a": mask}.items()}["a"]


def over_lines(mask: Any) -> Any:
    return (
        mask[:, :, :]
        if mask is not None
        else None
    )  # fmt: skip


def of_a_part(mask: Any) -> Any:
    return mask[:, :, -1:] if mask is not None else None


def with_another_case(mask: Any) -> Any:
    return mask[:, :] if mask is not None else torch.zeros(1)


def with_more_in_the_case(mask: Any) -> Any:
    return mask[:, :] if mask is not None else None or torch.zeros(1)


def of_another(mask: Any) -> Any:
    other = mask
    return mask[:, :] if other is not None else None


def without_a_case(mask: Any) -> Any:
    return mask[:, :]


def results(use: Callable[[Any], Any], attention_mask: Tensor) -> tuple[Any, Any]:
    model, x = Masked(use), torch.zeros(2, 6, 8)
    specs = {"x": InputSpec(3, torch.float32), "attention_mask": InputSpec(2, torch.int64)}
    graph = trace(model, specs, {}, TracingOptions((nn.Linear,)))
    inputs = {"x": x, "attention_mask": attention_mask}
    return run_graph(model, graph, inputs)[1], model(**inputs)[1]


PADDED = torch.ones(2, 6, dtype=torch.long)
PADDED[0, 0] = 0
FULL = torch.ones_like(PADDED)


@pytest.mark.parametrize("use", [in_one_line, in_a_comprehension, over_lines])
def test_the_whole_of_a_mask_is_there_or_not_as_in_the_model(use: Callable[[Any], Any]) -> None:
    ours, theirs = results(use, PADDED)
    assert isinstance(theirs, Tensor)
    assert torch.equal(ours, theirs)
    assert results(use, FULL) == (None, None)


@pytest.mark.parametrize("use", [of_a_part, with_another_case, with_more_in_the_case, of_another, without_a_case])
def test_other_uses_of_a_mask_that_is_none_are_an_error_with_the_line(use: Callable[[Any], Any]) -> None:
    ours, theirs = results(use, PADDED)
    assert torch.equal(ours, theirs)
    with pytest.raises(RuntimeError, match=rf"a mask is None(.|\n)*test_optional_masks.py:\d+, in {use.__name__}"):
        results(use, FULL)
