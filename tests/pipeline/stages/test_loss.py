"""Choice of the loss among the outputs."""

from typing import Any

import pytest
from transformers.modeling_outputs import CausalLMOutput

from nxdpp.pipeline.stages.loss import check_loss_spec, pick_loss

# Text in place of traced values, since the choice does not depend on them.
LOSS: Any = "the loss"
OTHER: Any = "something else"


@pytest.mark.parametrize(
    ("output", "spec"),
    [
        ([LOSS], None),
        ({"loss": LOSS, "logits": OTHER}, None),
        (CausalLMOutput(loss=LOSS, logits=OTHER), None),
        ((OTHER, LOSS), (False, True)),
        ({"first": OTHER, "second": LOSS}, {"first": False, "second": True}),
        ({"loss": OTHER, "other": LOSS}, {"loss": False, "other": True}),
        (CausalLMOutput(loss=OTHER, logits=LOSS), (False, True)),
        ((OTHER, {"inner": (OTHER, LOSS)}), (False, {"inner": (False, True)})),
    ],
)
def test_the_loss_is_found(output: Any, spec: Any) -> None:
    check_loss_spec(spec)

    assert pick_loss(output, spec) is LOSS


@pytest.mark.parametrize(
    ("output", "spec", "words"),
    [
        ({"logits": OTHER}, None, ["no loss, only ['logits']", "labels=...", "output_loss_value_spec"]),
        (
            (OTHER, OTHER, OTHER),
            None,
            ["returns 3 values", "(True, False, False) if it is the first, (False, False, True) if it is the last"],
        ),
        ((OTHER, OTHER, OTHER), (True, False), ["is for 2 values", "returns 3 values"]),
        ({"logits": OTHER}, {"loss": True}, ["marks 'loss'", "['logits']"]),
    ],
)
def test_an_output_without_the_loss(output: Any, spec: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        pick_loss(output, spec)

    assert all(word in str(caught.value) for word in words), str(caught.value)
