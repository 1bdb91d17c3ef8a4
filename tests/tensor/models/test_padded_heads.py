"""Heads of zeros: numbers, initial weights, training and checkpoints are those of the model without them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from nxdpp import (
    NxDPPModel,
    check_tensor_parallel,
    init_on_device,
    load_pretrained,
    parallel_state,
    save_pretrained,
    tensor_parallelize,
)
from nxdpp.initialization.parts import own_part
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import batch, differing, llama, make

HEADS: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "head_dim": 8}
# The second rank has padding alone.
ONE_HEAD: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 24, "head_dim": 8}


def _with_biases_and_norms() -> list[Any]:
    sizes = llama().config.to_dict() | HEADS
    names = ("vocab_size", "intermediate_size", "num_hidden_layers", "use_cache", *HEADS)
    chosen = {name: sizes[name] for name in names}
    torch.manual_seed(0)
    models = [Qwen2ForCausalLM(Qwen2Config(**chosen)), Qwen3ForCausalLM(Qwen3Config(**chosen))]
    for name, parameter in models[0].named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return models


def _numbers() -> None:
    for model in (make("llama", **ONE_HEAD), *_with_biases_and_norms()):
        assert check_tensor_parallel(model, batch(), pad_heads=True)[0] < 1e-12, type(model)


def _on_meta(seed: int, divide: bool, heads: dict[str, Any]) -> NxDPPModel:
    torch.manual_seed(seed)
    with init_on_device(torch.device("meta")):
        model = llama(**heads)
    return NxDPPModel(tensor_parallelize(model, pad_heads=True) if divide else model, num_microbatches=1)


def _initial_weights() -> None:
    divided, undivided = _on_meta(3, True, HEADS), _on_meta(3, False, HEADS)
    for model in (divided, undivided):
        model.move_model_to_device()
    assert not differing(dict(divided.local_named_parameters()), undivided.local_module)


def _checkpoints(folder: Path, heads: dict[str, Any]) -> None:
    whole = make("llama", **heads)
    if dist.get_rank() == 0:
        whole.save_pretrained(folder / "theirs")
    dist.barrier()
    in_memory = NxDPPModel(tensor_parallelize(make("llama", 1, **heads), pad_heads=True), num_microbatches=1)
    for model in (in_memory, _on_meta(2, True, heads)):
        load_pretrained(model, folder / "theirs")
        assert not differing(dict(model.local_named_parameters()), whole)
    save_pretrained(model, folder / "ours")
    dist.barrier()
    saved = LlamaForCausalLM.from_pretrained(folder / "ours").state_dict()
    assert saved.keys() == whole.state_dict().keys()
    assert all(torch.equal(saved[name], value) for name, value in whole.state_dict().items())


def _training() -> None:
    model, whole = tensor_parallelize(make("llama", **HEADS).double(), pad_heads=True), make("llama", **HEADS).double()
    wrapped = NxDPPModel(model, num_microbatches=1)
    # A larger eps: AdamW makes steps of the learning rate of gradients that are only rounding.
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in (wrapped, whole)]
    for _ in range(2):
        wrapped.run_train(**batch())
        whole(**batch()).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in wrapped.local_named_parameters():
        expected = own_part(whole.get_parameter(name), parameter)
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5)
        assert not (parameter * (expected == 0)).any()


def _cases(rank: int, folder: Path) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    _numbers()
    _initial_weights()
    _checkpoints(folder / "one head", ONE_HEAD)
    _training()
    parallel_state.destroy_model_parallel()


def test_padded_heads_equal_one_process(tmp_path: Path) -> None:
    run_ranks(2, _cases, tmp_path)


@pytest.mark.usefixtures("one_of_two")
class TestOneOfTwo:
    def test_padding_is_last(self) -> None:
        whole = make("llama", **HEADS)
        attention = tensor_parallelize(make("llama", **HEADS), pad_heads=True).model.layers[0].self_attn
        assert attention.q_proj.weight.shape == (32, 48)
        assert torch.equal(attention.k_proj.weight, whole.model.layers[0].self_attn.k_proj.weight[:16])
        assert attention.o_proj.weight.shape == (48, 32)

    def test_the_refusal_names_it(self) -> None:
        with pytest.raises(
            ValueError, match=r"3 heads .* divide over 2 .*: give pad_heads=True, which adds heads of z"
        ):
            tensor_parallelize(make("llama", **HEADS))
        with pytest.raises(ValueError, match=r"3 heads .* divide over 2 tensor-parallel ranks: use a tensor-parallel"):
            tensor_parallelize(_Own(make("llama", **HEADS).config), pad_heads=True, plan=llama().tp_plan)


class _OwnAttention(LlamaAttention):
    pass


class _Own(LlamaForCausalLM):
    """A model with an attention that is on no list."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.__class__ = _OwnAttention
