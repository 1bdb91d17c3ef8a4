"""Models of ``nxdpp.oslo.initialize`` train under torch's DDP as one process does, and come back from their files."""

import copy
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

import nxdpp.oslo as oslo
from nxdpp import gather_state_dict, parallel_state
from nxdpp.gradients.gradient_norm import clip_grad_norm
from nxdpp.ranks.faults import failure_watch
from tests.doors.oslo.training import (
    LENGTH,
    batch,
    distances,
    engine_of,
    gpt2,
    parallel_losses,
    qwen3,
    whole_losses,
)
from tests.support.run_ranks import run_ranks

STEPS = range(4)


def _config(tensor: int) -> dict[str, Any]:
    return {"model_parallelism": {"enable": True, "tensor_parallel_size": tensor}}


def _with_replicas(rank: int, folder: Path) -> None:
    _check_training(folder)


def _over_two_tensor_ranks(rank: int, folder: Path) -> None:
    _check_summed_gradients()
    _check_other_inputs()
    _check_copies()
    _check_generation()
    _check_files(folder)


def _check_training(folder: Path) -> None:
    whole, model = gpt2(), gpt2()
    config, kind = model.config, type(model)
    optimizer, reference = Adam(model.parameters(), lr=1e-2), Adam(whole.parameters(), lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    before = [weakref.ref(parameter) for parameter in model.parameters()]

    parallel = oslo.initialize(model, _config(2))

    assert parallel is model
    assert isinstance(model, kind)
    assert model.config is config
    # The optimizer has this rank's parameters, and no other tensors.
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert list(map(id, held)) == list(map(id, model.parameters()))
    assert all(ref() is None or any(ref() is parameter for parameter in held) for ref in before)
    assert sum(map(torch.numel, held)) < 0.7 * sum(map(torch.numel, whole.parameters()))

    replica = model.mpu.get_data_parallel_rank()
    engine = engine_of(model)
    losses = parallel_losses(engine, optimizer, STEPS, replica)
    assert losses == pytest.approx(whole_losses(whole, reference, STEPS, 2)[replica], abs=1e-5)
    gathered = gather_state_dict(model)
    if gathered is not None:
        assert max(distance for _, distance in distances(gathered, whole.state_dict())) < 1e-4
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 5e-3

    inputs = batch(9, replica)
    with torch.no_grad():
        assert torch.allclose(model.eval()(**inputs).logits, whole.eval()(**inputs).logits, atol=1e-3)
    with pytest.raises(RuntimeError, match=r"call save_parallelized\(directory, merge_checkpoints=True\)"):
        model.save_pretrained(folder)
    with pytest.raises(RuntimeError, match="call it before"):
        model.resize_token_embeddings(64)
    with pytest.raises(RuntimeError, match="was given to initialize before"):
        oslo.initialize(model, _config(2))
    stepped = gpt2()
    stepped_optimizer = Adam(stepped.parameters(), lr=1e-2)
    stepped(**inputs).loss.backward()
    stepped_optimizer.step()
    with pytest.raises(ValueError, match="has stepped"):
        oslo.initialize(stepped, _config(2))
    assert not hasattr(stepped, "mpu")


def _check_summed_gradients() -> None:
    """Gradients of norms of this rank's heads are those of all heads."""
    whole, model = qwen3(), qwen3()
    model.model.layers[0].requires_grad_(False)
    model = oslo.initialize(model, _config(2))
    model.requires_grad_(True)
    engine = engine_of(model)
    for step in range(2):
        engine(**batch(step, 0)).loss.backward()
        whole(**batch(step, 0)).loss.backward()
    for name, parameter in model.named_parameters():
        expected = whole.get_parameter(name).grad
        if parameter.shape == expected.shape:
            assert torch.allclose(parameter.grad, expected, atol=1e-6), name
    norm = float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9))
    assert float(clip_grad_norm(model.parameters(), 1e9)) == pytest.approx(norm, rel=1e-5)


def _check_other_inputs() -> None:
    """A sampler by global ranks, which feeds the ranks of a tensor group with other rows, is refused."""
    model = oslo.initialize(gpt2(), _config(2))
    engine = engine_of(model)
    with torch.no_grad():
        engine(**batch(0, 0))
    with pytest.raises(RuntimeError, match=r"share one replica .* got other inputs: .* rank=model\.mpu\.get_data_para"):
        engine(**batch(0, torch.distributed.get_rank()))
    # The remedy.
    engine(**batch(0, model.mpu.get_data_parallel_rank()))


def _check_copies() -> None:
    """Clipping by the norm of one rank alone is found by a later call."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        # The error would end all ranks.
        monkeypatch.setattr(failure_watch, "report", lambda error: None)
        sentence = r"each tensor rank has a copy of transformer\.\S+, and an optimizer stepped it"
        with pytest.raises(RuntimeError, match=sentence):
            _two_calls(torch.nn.utils.clip_grad_norm_)
    _two_calls(clip_grad_norm)


def _two_calls(clip: Any) -> None:
    """Call a tensor-parallel model again after a step whose gradients ``clip`` has clipped."""
    model = oslo.initialize(gpt2(), _config(2)).train()
    optimizer = SGD(model.parameters(), lr=1e-2)
    model(**batch(0, 0)).loss.backward()
    clip(model.parameters(), 0.1)
    optimizer.step()
    model(**batch(0, 0))


def _check_generation() -> None:
    model, whole = oslo.initialize(gpt2(), _config(2)), gpt2()
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    ids = batch(0, 0)["input_ids"][:, : LENGTH // 2]
    assert torch.equal(model.generate(ids, **options), whole.generate(ids, **options))
    options["do_sample"] = True
    torch.manual_seed(torch.distributed.get_rank() % 2)
    with pytest.raises(RuntimeError, match=r"got other inputs: .* call torch\.manual_seed with one number"):
        model.generate(ids, **options)
    torch.manual_seed(5)  # the remedy
    sampled = model.generate(ids, **options)
    torch.manual_seed(5)
    assert torch.equal(sampled, whole.generate(ids, **options))
    with pytest.raises(RuntimeError, match="give all ranks of a tensor group the same arguments"):
        model.generate(ids + torch.distributed.get_rank() % 2)


def _check_files(folder: Path) -> None:
    original = gpt2()
    model = oslo.initialize(gpt2(), _config(2))
    parts, merged = folder / "parallel_ckpt", folder / "merged_ckpt"
    model.save_parallelized(save_directory=parts)
    model.save_parallelized(parts)  # replaces the files
    model.save_parallelized(merged, merge_checkpoints=True)

    names = ["config.json", "pytorch_model_tp_0_pp_0.bin", "pytorch_model_tp_1_pp_0.bin"]
    assert sorted(path.name for path in parts.iterdir()) == names
    assert sorted(path.name for path in merged.iterdir()) == ["config.json", "pytorch_model.bin"]
    assert json.loads((merged / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    loaded = AutoModelForCausalLM.from_pretrained(merged)
    assert isinstance(loaded, GPT2LMHeadModel)
    assert all(distance == 0 for _, distance in distances(loaded.state_dict(), original.state_dict()))

    torch.manual_seed(1)
    other: Any = GPT2LMHeadModel(copy.deepcopy(original.config))
    optimizer = Adam(other.parameters())
    other = oslo.initialize(other, _config(2))
    held = list(other.parameters())
    assert other.from_parallelized(parts) is other
    assert all(before is after for before, after in zip(held, other.parameters(), strict=True))
    assert len(optimizer.param_groups[0]["params"]) == len(held)
    assert all(distance == 0 for _, distance in distances(other.state_dict(), model.state_dict()))
    _check_other_weights(parts)
    _check_refused_files(other, parts, merged)


def _check_other_weights(parts: Path) -> None:
    """Ranks of a tensor group with other weights are refused until the weights are loaded."""
    model = gpt2()
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.bias[4] += torch.distributed.get_rank() % 2
    model = oslo.initialize(model, _config(2))
    with pytest.raises(RuntimeError, match=r"Call torch\.manual_seed with one number on all ranks before the model is"):
        model(**batch(0, 0))
    expected = gpt2()(**batch(0, 0)).loss
    assert float(model.from_parallelized(parts)(**batch(0, 0)).loss.detach()) == pytest.approx(
        float(expected), abs=1e-5
    )
    drops = gpt2()
    drops.transformer.drop.p = 0.1
    torch.manual_seed(torch.distributed.get_rank() % 2)
    with pytest.warns(UserWarning, match="random states differ between the tensor-parallel ranks"):
        drops = oslo.initialize(drops, _config(2))
    # The remedy: the same masks on both ranks, so equal losses.
    torch.manual_seed(0)
    loss = drops.train()(**batch(0, 0)).loss.detach()
    both = [torch.empty_like(loss) for _ in range(2)]
    torch.distributed.all_gather(both, loss, group=drops.mpu.get_tensor_parallel_group())
    assert torch.equal(*both)


def _check_refused_files(model: Any, parts: Path, merged: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has pytorch_model\.bin"):
        model.from_parallelized(merged)
    larger = oslo.initialize(gpt2(n_inner=32), _config(2))
    with pytest.raises(ValueError, match=r"h\.0\.mlp\.c_fc\.weight has the shape \(16, 32\)"):
        larger.from_parallelized(parts)
    shorter = oslo.initialize(gpt2(), _config(2))
    del shorter.transformer.h[3]
    before = shorter.transformer.h[0].mlp.c_fc.weight.clone()
    with pytest.raises(ValueError, match=r"transformer\.h\.3\.ln_1\.weight is not this rank's, but is in"):
        shorter.from_parallelized(parts)
    assert torch.equal(shorter.transformer.h[0].mlp.c_fc.weight, before)
    parallel_state.destroy_model_parallel()
    alone = oslo.initialize(gpt2(), _config(1))
    with pytest.raises(ValueError, match=r"tp_1_pp_0\.bin is of a save with other sizes"):
        alone.from_parallelized(parts)
    with pytest.raises(ValueError, match="give another directory, or remove the file"):
        alone.save_parallelized(parts)
    if alone.mpu.get_data_parallel_rank() == 0:
        (merged / "model.safetensors").write_text("")
    with pytest.raises((ValueError, RuntimeError), match=r"has model\.safetensors, which from_pretrained would read"):
        alone.save_parallelized(merged, merge_checkpoints=True)


def test_tensor_parallelism_with_replicas(tmp_path: Path) -> None:
    run_ranks(4, _with_replicas, tmp_path)


def test_two_tensor_ranks_compute_generate_and_save_as_one_process(tmp_path: Path) -> None:
    run_ranks(2, _over_two_tensor_ranks, tmp_path)
