"""Python calls that a trace makes for each layer: a count that is the same on a busy machine."""

import sys
from types import FrameType
from typing import Any

from tests.support.models import make, padded_batch
from tests.support.traced_models import trace_with

# Commit bcc1f5d, before the checks of issue 11, made 1037 calls a layer.
MOST_CALLS_OF_A_LAYER = 800


def test_a_layer_of_a_llama_costs_few_calls() -> None:
    few, many = (_calls_of_a_trace(make("llama", num_hidden_layers=layers)) for layers in (4, 8))
    assert (many - few) / 4 <= MOST_CALLS_OF_A_LAYER


def _calls_of_a_trace(model: Any) -> int:
    inputs = padded_batch(2)
    trace_with(model, inputs)  # later traces find code that is read once
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        trace_with(model, inputs)
    finally:
        sys.setprofile(previous)
    return calls
