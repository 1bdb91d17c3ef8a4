"""Kernel fusion of ``nxdpp.oslo.initialize``: the right parts are compiled in place, and gradients stay equal."""

import json
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

import nxdpp.oslo as oslo
from nxdpp import parallel_state
from tests.doors.oslo.training import (
    LENGTH,
    MODELS,
    THEIR_CONFIGURATIONS,
    batch,
    compiled_types,
    compiled_without_code,
    gpt2,
    qwen3,
)

BUILT = torch.nn.Module.compile


@pytest.fixture(autouse=True)
def _end() -> Iterator[None]:
    with compiled_without_code():
        yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    parallel_state.destroy_model_parallel()


def _check_gradients(model: Any, whole: Any) -> None:
    """Compare a step of ``model`` with one of ``whole``, and see that graphs were compiled for it."""
    for each in (whole, model):
        each(**batch(0, 0)).loss.backward()
    for (name, parameter), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad), name
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_their_configuration_compiles_the_whole_model(tmp_path: Path) -> None:
    path = tmp_path / "kernel_fusion.json"
    path.write_text(json.dumps(THEIR_CONFIGURATIONS["kernel_fusion"]))
    model, whole = gpt2(n_layer=1), gpt2(n_layer=1)
    with pytest.warns(UserWarning, match="FusedNoRepeatNGram is not built: generate"):
        assert oslo.initialize(model, config=str(path)) is model
    assert compiled_types(model) == {"GPT2LMHeadModel": 1}
    _check_gradients(model, whole)
    assert list(model.state_dict()) == list(whole.state_dict())
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "no_repeat_ngram_size": 2}
    ids = batch(0, 0)["input_ids"][:, : LENGTH // 2]
    assert torch.equal(model.eval().generate(ids, **options), whole.eval().generate(ids, **options))


@pytest.mark.sweep
def test_built_code_is_equal_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the code of inductor, which takes long to build."""
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(BUILT, backend="inductor"))
    config = {"kernel_fusion": {"enable": True, "custom_cuda_kernels": ["FusedRMSNorm"]}}
    for whole in (False, True):
        sections = {"kernel_fusion": {"enable": True, "memory_efficient_fusion": True}} if whole else config
        model, expected = oslo.initialize(qwen3(), sections), qwen3()
        for each in (expected, model):
            each(**batch(0, 0)).loss.backward()
        for (name, parameter), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, theirs.grad, rtol=1e-5, atol=1e-6, msg=name)
        assert torch._dynamo.utils.counters["inductor"]
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("name", MODELS)
def test_activation_functions_are_compiled(name: str) -> None:
    config = {"kernel_fusion": {"enable": True}, "activation_checkpointing": {"enable": True}}
    model = oslo.initialize(MODELS[name](), config)
    # The head of BERT has one too.
    assert compiled_types(model) == {"gpt2": {"NewGELUActivation": 4}, "bert": {"GELUActivation": 5}}[name]
    _check_gradients(model, MODELS[name]())


def test_norms_are_compiled() -> None:
    config = {"kernel_fusion": {"enable": True, "custom_cuda_kernels": ["FusedRMSNorm"]}}
    model = oslo.initialize(qwen3(), config)
    assert compiled_types(model) == {"SiLUActivation": 2, "Qwen3RMSNorm": 9}
    _check_gradients(model, qwen3())


def test_a_fusion_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no RMS norm: leave FusedRMSNorm out"):
        oslo.initialize(gpt2(), {"kernel_fusion": {"enable": True, "custom_cuda_kernels": ["FusedRMSNorm"]}})
    model = gpt2()
    for layer in model.transformer.h:
        del layer.mlp.act
        layer.mlp.act = torch.tanh
    with pytest.raises(ValueError, match='GPT2LMHeadModel has no module of one: leave it out, or add "memory_eff'):
        oslo.initialize(model, {"kernel_fusion": {"enable": True}})
