"""Two stages of two tensor-parallel ranks: numbers, initial weights and checkpoints are those of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

from nxdpp import (
    NxDPPModel,
    deferred_init,
    init_on_device,
    load_pretrained,
    parallel_state,
    save_pretrained,
    tensor_parallelize,
)
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import batch, differing, gradient_distance, llama, make

MICROBATCHES = 2


def _wrap(model: torch.nn.Module, divide: bool = True, **arguments: Any) -> NxDPPModel:
    return NxDPPModel(tensor_parallelize(model) if divide else model, num_microbatches=MICROBATCHES, **arguments)


def _on_meta(seed: int, divide: bool, tie: bool) -> NxDPPModel:
    torch.manual_seed(seed)
    with init_on_device(torch.device("meta")):
        model = llama(tie_word_embeddings=tie)
    return _wrap(model, divide)


def _step(name: str, **changes: Any) -> float:
    """Distance of a step's gradients; the loss is compared on the last stage."""
    model, whole = _wrap(make(name, **changes)), make(name, **changes)
    loss = model.run_train(**batch())
    total = torch.zeros(())
    for part in zip(*(value.chunk(MICROBATCHES) for value in batch().values()), strict=True):
        one = whole(**dict(zip(batch(), part, strict=True))).loss / MICROBATCHES
        one.backward()
        total += one.detach()
    if model.holds_last_stage:
        torch.testing.assert_close(loss, total, rtol=1e-5, atol=0)
    return gradient_distance(dict(model.local_named_parameters()), whole)


def _labels_of_one_microbatch() -> dict[str, torch.Tensor]:
    """A batch whose second microbatch has no label."""
    inputs = batch()
    inputs["labels"][2:] = -100
    return inputs


def _microbatch_without_labels() -> float:
    """The refusal of the step; then the distance of the gradients of the mean over tokens, which the message names."""
    inputs = _labels_of_one_microbatch()
    model = _wrap(make("llama"))
    for step in (model.run_train, model.run_eval):
        with pytest.raises(ValueError, match=r"microbatch 1 of 2 has no label: .*loss_normalization='tokens'"):
            step(**inputs)
    assert all(parameter.grad is None for parameter in model.local_parameters())
    model, whole = _wrap(make("llama"), loss_normalization="tokens"), make("llama")
    loss, expected = model.run_train(**inputs), whole(**inputs).loss
    expected.backward()
    if model.holds_last_stage:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    return gradient_distance(dict(model.local_named_parameters()), whole)


def _checkpoints(folder: Path, tie: bool) -> list[str]:
    """Names of differing parameters."""
    whole = make("llama", tie_word_embeddings=tie)
    if dist.get_rank() == 0:
        whole.save_pretrained(folder / "theirs")
    dist.barrier()
    found = []
    model = _wrap(make("llama", 1, tie_word_embeddings=tie))
    load_pretrained(model, folder / "theirs")
    found += differing(dict(model.local_named_parameters()), whole)
    model = _on_meta(1, True, tie)
    assert all(parameter.is_meta for parameter in model.local_parameters())
    load_pretrained(model, folder / "theirs")
    found += differing(dict(model.local_named_parameters()), whole)
    save_pretrained(model, folder / "ours")
    dist.barrier()
    again = LlamaForCausalLM.from_pretrained(folder / "ours")
    saved, expected = again.state_dict(), whole.state_dict()
    assert saved.keys() == expected.keys()
    return found + [name for name in saved if not torch.equal(saved[name], expected[name])]


def _initial_weights(tie: bool) -> list[str]:
    torch.manual_seed(5)
    deferred = tensor_parallelize(deferred_init(llama, tie_word_embeddings=tie))
    assert all(parameter.is_meta for parameter in deferred.parameters())
    model = _wrap(deferred, divide=False)
    model.move_model_to_device()
    found = differing(dict(model.local_named_parameters()), make("llama", 5, tie_word_embeddings=tie))
    divided, undivided = _on_meta(6, True, tie), _on_meta(6, False, tie)
    for one in (divided, undivided):
        one.move_model_to_device()
    return found + differing(dict(divided.local_named_parameters()), undivided.local_module)


def _cases(rank: int, folder: Path) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert _microbatch_without_labels() < 1e-5
    assert _step("t5") < 1e-5
    assert _step("llama", tie_word_embeddings=True) < 1e-5
    assert not _checkpoints(folder, True)
    assert not _initial_weights(True)
    parallel_state.destroy_model_parallel()


def test_two_stages_of_two_tensor_ranks(tmp_path: Path) -> None:
    run_ranks(4, _cases, tmp_path)
