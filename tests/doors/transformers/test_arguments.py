"""Each field of ``TrainingArguments`` is in one table, and a field that is not honoured is refused by name."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from torch import nn
from transformers import Trainer, TrainingArguments

from nxdpp.doors.transformers import arguments, checks
from nxdpp.integrations import PipelineTrainer
from tests.support.models import llama

REFUSED: dict[str, Any] = {
    "label_smoothing_factor": 0.1,
    "use_liger_kernel": True,
    "liger_kernel_config": {"rope": True},
    "neftune_noise_alpha": 5.0,
    "fp16": True,
    "fp16_full_eval": True,
    "bf16_full_eval": True,
    "optim_target_modules": "all-linear",
    "auto_find_batch_size": True,
    "eval_use_gather_object": True,
    "save_on_each_node": True,
    "enable_jit_checkpoint": True,
    "push_to_hub": True,
    "parallelism_config": object(),
    "ddp_find_unused_parameters": False,
    "ddp_bucket_cap_mb": 25,
    "ddp_broadcast_buffers": False,
    "ddp_static_graph": True,
    "deepspeed": {"zero_optimization": {}},
    "debug": ["underflow_overflow"],
}


@pytest.fixture
def make(tmp_path: Path) -> Any:
    return partial(TrainingArguments, output_dir=str(tmp_path), use_cpu=True, report_to="none")


def test_each_field_is_in_one_table() -> None:
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    tables = [arguments.HONOURED, frozenset(arguments.WITHOUT_EFFECT), frozenset(arguments.REFUSED)]
    assert frozenset.union(*tables) == fields
    assert sum(map(len, tables)) == len(fields)
    assert set(REFUSED) == set(arguments.REFUSED)


def test_fields_are_refused_by_name(make: Any) -> None:
    for name, value in REFUSED.items():
        args = make()
        # Some values are refused by TrainingArguments itself without their library or device.
        setattr(args, name, value)
        with pytest.raises(ValueError, match=rf"PipelineTrainer cannot honour {name}=.*\. ?"):
            arguments.check_arguments(args)


def test_a_field_of_a_newer_transformers_is_refused(make: Any) -> None:
    newer = dataclasses.make_dataclass("Newer", [("new_option", int, 0)], bases=(TrainingArguments,))
    args = make()
    args.__class__ = newer
    args.new_option = 0
    arguments.check_arguments(args)
    args.new_option = 1
    with pytest.raises(ValueError, match="cannot honour new_option=1: it is newer than this PipelineTrainer"):
        arguments.check_arguments(args)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optim": "lomo"}, "optim='lomo': a rank has some layers only. It takes adafactor, adagrad, adamw_torch, "),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config: split_batches=True"),
        ({"output_dir": "s3://bucket/run"}, "'s3://bucket/run' is not on a file system"),
    ],
)
def test_a_value_is_refused_by_name(given: dict[str, Any], message: str, make: Any) -> None:
    with pytest.raises(ValueError, match=message):
        arguments.check_arguments(make(**given))


def test_a_trainer_compiles_the_layers(make: Any) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    trainer = PipelineTrainer(llama(2), make(max_steps=1, torch_compile_backend="eager"))
    layers = [module for name, module in trainer.pipelined.named_modules() if name in trainer.pipelined.layers]
    assert [layer._compiled_call_impl is not None for layer in layers] == [True, True]
    AcceleratorState._reset_state(reset_partial_state=True)


class OwnLoss(PipelineTrainer):
    """A trainer with a loss of its own."""

    def compute_loss(self, model: nn.Module, inputs: Any, *others: Any, **named: Any) -> Any:
        return 0.0


@pytest.mark.parametrize(
    ("cls", "given", "message"),
    [
        (PipelineTrainer, {"compute_loss_func": len}, "cannot honour compute_loss_func: the last stage computes"),
        (OwnLoss, {}, "OwnLoss has a compute_loss of its own, which a pipeline does not call"),
        (PipelineTrainer, {"num_microbatches": 3}, "=3 must be a multiple of gradient_accumulation_steps=2"),
        (PipelineTrainer, {"most_tokens": 9, "num_microbatches": 4}, "=4 and most_tokens=9 exclude each other"),
    ],
)
def test_an_argument_is_refused_before_anything_is_changed(
    cls: type[Trainer], given: dict[str, Any], message: str, make: Any
) -> None:
    model = llama(2)
    with pytest.raises(ValueError, match=message):
        cls(model, make(gradient_accumulation_steps=2), **given)
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_loss_that_parts_of_a_batch_would_change_is_refused() -> None:
    model = llama(2)
    checks.check_split(False, model, is_divided=False)
    checks.check_split(True, model, is_divided=True)
    with pytest.raises(ValueError, match="the loss of LlamaForCausalLM is not divided by num_items_in_batch"):
        checks.check_split(True, model, is_divided=False)
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits=True adds a loss that is a mean over a batch"):
        checks.check_split(True, model, is_divided=True)
