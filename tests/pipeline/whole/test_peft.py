"""Models that PEFT adapts: losses and the gradients of the adapters are those of one process."""

import pytest

from tests.pipeline.whole.test_wrapped_transformers import check_exact
from tests.support.adapted_models import ADAPTERS, PROMPTS, adapted, inputs_for
from tests.support.wrapped_models import batch


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", [*ADAPTERS, *PROMPTS])
def test_an_adapted_model_is_exact(name: str, stages: int) -> None:
    inputs = inputs_for(name, batch("input_ids", "attention_mask", "labels"))

    pipeline = check_exact(adapted(name), inputs, stages)

    frozen = [parameter for parameter in pipeline.partition.module.parameters() if not parameter.requires_grad]
    assert frozen
    assert all(parameter.grad is None for parameter in frozen)
