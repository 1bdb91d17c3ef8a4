"""Models that PEFT adapts: losses and the gradients of the adapters are those of one process."""

import peft
import pytest

from tests.pipeline.whole.test_wrapped_transformers import check_exact
from tests.support.adapted_models import adapted, base, inputs_for
from tests.support.in_process import InProcessPipeline
from tests.support.wrapped_models import batch


# Prompts and prefixes are sent between stages as other values; adapters are inside of layers.
@pytest.mark.parametrize(
    ("name", "stages"),
    [("modules to save", 2), ("dora", 2), ("lora of experts", 2), ("prompt", 2), ("prefix", 3), ("prefix of t5", 3)],
)
def test_an_adapted_model_is_exact(name: str, stages: int) -> None:
    inputs = inputs_for(name, batch("input_ids", "attention_mask", "labels"))

    pipeline = check_exact(adapted(name), inputs, stages)

    frozen = [parameter for parameter in pipeline.partition.module.parameters() if not parameter.requires_grad]
    assert frozen
    assert all(parameter.grad is None for parameter in frozen)


def test_the_regularisation_of_adalora_is_refused() -> None:
    settings = peft.AdaLoraConfig(
        task_type="CAUSAL_LM", init_r=4, target_r=2, total_step=10, target_modules=["q_proj", "v_proj"]
    )
    model = peft.get_peft_model(base("lora"), settings)

    with pytest.raises(ValueError, match=r"AdaLoRA.*adapters of all layers.*LoraConfig"):
        InProcessPipeline(model, 2)
