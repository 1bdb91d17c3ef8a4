"""Pipelined models of ``nxdpp.oslo.initialize`` train under torch's DDP as one process does."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Adam
from transformers import AutoModelForCausalLM

import nxdpp.oslo as oslo
from nxdpp import gather_state_dict, parallel_state
from nxdpp.gradients.gradient_norm import clip_grad_norm
from tests.doors.oslo.checkpointing import check_several_ranks
from tests.doors.oslo.training import (
    MODELS,
    ROWS,
    batch,
    compiled_without_code,
    distances,
    engine_of,
    gpt2,
    parallel_losses,
    whole_losses,
)
from tests.support.run_ranks import run_ranks

STEPS = range(3)


def _config(tensor: int, pipeline: int) -> dict[str, Any]:
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    return {"model_parallelism": {"enable": True, **sizes}}


def _over_four_ranks(rank: int, folder: Path) -> None:
    for name in MODELS:
        _check_training(name, 1, 2, 1, 1e-6)
    _check_training("gpt2", 1, 2, 2, 1e-6)
    _check_gradients()
    _check_frozen_stages()
    _check_changed_after()
    _check_all_labels()
    _check_files(folder)
    check_several_ranks(1, 2)
    parallel_state.destroy_model_parallel()
    with compiled_without_code():
        _check_training("gpt2", 2, 2, 1, 1e-5, kernel_fusion={"enable": True})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    parallel_state.destroy_model_parallel()


def _check_training(
    name: str, tensor: int, pipeline: int, microbatches: int, tolerance: float, **sections: Any
) -> None:
    whole, model = MODELS[name](), MODELS[name]()
    optimizer, reference = Adam(model.parameters(), lr=1e-2), Adam(whole.parameters(), lr=1e-2)

    before = [weakref.ref(parameter) for parameter in model.parameters()]
    config = _config(tensor, pipeline) | sections
    assert oslo.initialize(model, config, num_microbatches=microbatches) is model

    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    local = [parameter for parameter in model.parameters() if not parameter.is_meta]
    assert list(map(id, held)) == list(map(id, local))
    assert all(ref() is None or any(ref() is parameter for parameter in held) for ref in before)
    assert sum(map(torch.numel, held)) < 0.8 * sum(map(torch.numel, whole.parameters()))
    assert model.device.type == torch.empty(0).device.type

    replica = model.mpu.get_data_parallel_rank()
    replicas = model.mpu.get_data_parallel_world_size()
    if microbatches > 1:
        whole.forward = _in_microbatches(whole.forward, microbatches)
    losses = parallel_losses(engine_of(model), optimizer, STEPS, replica)
    expected = whole_losses(whole, reference, STEPS, replicas)[replica]
    assert losses == pytest.approx(expected, abs=tolerance)
    gathered = gather_state_dict(model)
    if gathered is not None:
        assert max(distance for _, distance in distances(gathered, whole.state_dict())) < 100 * tolerance

    if microbatches == 1 and whole.can_generate():
        for each in (model, whole):
            each.generation_config.max_new_tokens = 3
        ids = batch(9, replica)["input_ids"][:, :5]
        assert torch.equal(model.eval().generate(ids, num_beams=2), whole.eval().generate(ids, num_beams=2))

    # Logits are on all ranks without gradients.
    inputs = batch(9, replica)
    with torch.no_grad():
        output, other = model.eval()(**inputs), whole.eval()(**inputs)
    assert type(output) is type(other)
    assert torch.allclose(output.logits, other.logits, atol=1e-3)
    assert float(output.loss) == pytest.approx(float(other.loss), abs=1e-3)


def _in_microbatches(forward: Any, number: int) -> Any:
    """``forward`` of the whole model whose loss is the mean of those of the microbatches."""

    def run(**inputs: torch.Tensor) -> Any:
        parts = [{name: value.chunk(number)[index] for name, value in inputs.items()} for index in range(number)]
        outputs = [forward(**part) for part in parts]
        outputs[0].loss = torch.stack([output.loss for output in outputs]).mean()
        outputs[0].logits = torch.cat([output.logits for output in outputs])
        return outputs[0]

    return run


def _check_gradients() -> None:
    """Scaled losses, ``no_sync``, frozen parameters, clipping and refused calls."""
    whole, model = gpt2(), oslo.initialize(gpt2(), _config(1, 2))
    engine, replica = engine_of(model), model.mpu.get_data_parallel_rank()
    with engine.no_sync():
        (engine(**batch(0, replica)).loss / 2).backward()
    (engine(**batch(1, replica)).loss / 2).backward()
    for step in range(2):
        for each in range(2):
            (whole(**batch(step, each)).loss / 4).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    expected = dict(whole.named_parameters())
    assert len(found) == sum(not parameter.is_meta for parameter in model.parameters())
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected[name].grad, atol=1e-6), name
    norm = clip_grad_norm(model.parameters(), 1e9)
    assert float(norm) == pytest.approx(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9)), rel=1e-5)

    loss = model(batch(2, replica)["input_ids"], labels=batch(2, replica)["input_ids"]).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward of one call"):
        loss.backward()
    assert list(model(**batch(2, replica))) == ["loss"]
    with pytest.raises(ValueError, match="give labels=, or call it under"):
        model(batch(2, replica)["input_ids"])
    with (
        pytest.raises(RuntimeError, match=r"use torch\.autocast"),
        torch.autocast(torch.empty(0).device.type, torch.float16),
    ):
        model(**batch(2, replica))
    with torch.autocast(torch.empty(0).device.type, torch.bfloat16):  # the remedy
        model(**batch(2, replica)).loss.backward()
    with pytest.raises(RuntimeError, match="gradient_checkpointing_enable would not reach"):
        model.gradient_checkpointing_enable()
    handle = model.transformer.h[0].register_forward_hook(lambda *args: None)
    with pytest.raises(RuntimeError, match="hooks of 1 module, of a GPT2Block first"):
        model(**batch(2, replica))
    handle.remove()

    # The stages follow modes and plain attributes of the user's model.
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    losses = [float(model.train(mode)(**batch(2, replica)).loss.detach()) for mode in (False, True)]
    assert losses[0] == pytest.approx(float(whole.eval()(**batch(2, replica)).loss.detach()), abs=1e-6)
    assert abs(losses[1] - losses[0]) > 1e-3

    model.zero_grad()
    frozen = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    for parameter in frozen:
        parameter.requires_grad_(False)
    model(**batch(2, replica)).loss.backward()
    assert all(parameter.grad is None for parameter in frozen)
    assert any(parameter.grad is not None for parameter in model.parameters())


def _check_frozen_stages() -> None:
    """A rank all of whose parameters are frozen takes part."""
    for layers in (range(2), range(2, 4)):
        whole, model = gpt2(), gpt2()
        for each in (whole, model):
            frozen = [each.transformer.wte, each.transformer.wpe if layers[0] == 0 else each.transformer.ln_f]
            for module in (*frozen, *(each.transformer.h[index] for index in layers)):
                module.requires_grad_(False)
        model = oslo.initialize(model, _config(1, 2))
        replica = model.mpu.get_data_parallel_rank()
        has_trained = any(not parameter.is_meta and parameter.requires_grad for parameter in model.parameters())
        engine = engine_of(model) if has_trained else model
        engine(**batch(0, replica)).loss.backward()
        sum(whole(**batch(0, each)).loss / 2 for each in range(2)).backward()
        for name, parameter in model.named_parameters():
            expected = whole.get_parameter(name).grad
            if parameter.is_meta or expected is None:
                assert parameter.grad is None
            else:
                assert torch.allclose(parameter.grad, expected, atol=1e-6), name


def _check_changed_after() -> None:
    """Other inputs on the ranks of a pipeline are refused, and so are buffers that a conversion replaces."""
    model = gpt2()
    for layer in model.transformer.h:
        layer.register_buffer("offset", torch.zeros(1))
    model = oslo.initialize(model, _config(1, 2))
    with pytest.raises(
        RuntimeError, match=r"got other inputs: .* num_replicas=model\.mpu\.get_data_parallel_world_size"
    ):
        model(**batch(0, torch.distributed.get_rank()))
    model(**batch(0, model.mpu.get_data_parallel_rank()))  # the remedy
    for layer in model.transformer.h:
        layer.offset = layer.offset.clone()
    with pytest.raises(RuntimeError, match=r"2 buffers of the model were replaced .*\(offset of a GPT2Block first\)"):
        model(**batch(0, model.mpu.get_data_parallel_rank()))


def _check_all_labels() -> None:
    """``num_items_in_batch`` of all replicas gives the gradients of the mean over all labels, however they lie."""
    whole, model = gpt2(), oslo.initialize(gpt2(), _config(1, 2), num_microbatches=2)
    inputs = [batch(0, replica) for replica in range(2)]
    items = sum(int((each["labels"][:, 1:] != -100).sum()) for each in inputs)
    engine = engine_of(model)
    engine(**inputs[model.mpu.get_data_parallel_rank()], num_items_in_batch=items).loss.backward()
    sum(whole(**each, num_items_in_batch=items).loss for each in inputs).backward()
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            assert torch.allclose(parameter.grad, whole.get_parameter(name).grad, atol=1e-6), name


def _check_files(folder: Path) -> None:
    original, model = gpt2(), oslo.initialize(gpt2(), _config(1, 2))
    parts, merged = folder / "parallel_ckpt", folder / "merged_ckpt"
    model.save_parallelized(parts)
    model.save_parallelized(merged, merge_checkpoints=True)
    names = ["config.json", "pytorch_model_tp_0_pp_0.bin", "pytorch_model_tp_0_pp_1.bin"]
    assert sorted(path.name for path in parts.iterdir()) == names
    loaded = AutoModelForCausalLM.from_pretrained(merged).state_dict()
    assert all(distance == 0 for _, distance in distances(loaded, original.state_dict()))
    own = torch.load(parts / f"pytorch_model_tp_0_pp_{model.mpu.get_pipeline_parallel_rank()}.bin")
    assert len(own) < len(loaded)

    other = gpt2()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    optimizer = Adam(other.parameters())
    other = oslo.initialize(other, _config(1, 2)).from_parallelized(parts)
    assert len(optimizer.param_groups[0]["params"]) == sum(not each.is_meta for each in other.parameters())
    inputs = batch(0, model.mpu.get_data_parallel_rank())
    with torch.no_grad():
        assert torch.allclose(other(**inputs).logits, original(**inputs).logits, atol=1e-6)
    assert inputs["input_ids"].shape[0] == ROWS


@pytest.mark.one_python
def test_pipelines_equal_one_process(tmp_path: Path) -> None:
    run_ranks(4, _over_four_ranks, tmp_path, timeout=180.0)
