"""Quantised weights: dequantised as transformers does when asked, and refused with the remedy when not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils.quantization_config import Mxfp4Config

from nxdpp import NxDPPModel, load_pretrained, parallel_state, save_pretrained, tensor_parallelize
from tests.checkpoint.huggingface.checkpointed_models import differing, make, on_meta, tensors_in, wrap_as
from tests.support.wrapped_models import initialised

pytestmark = pytest.mark.usefixtures("no_groups_left")

BLOCK = 16
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def configure(folder: Path, **fields: Any) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))


def in_blocks(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 values of ``weight``, the scale of each block, and the bfloat16 values that they mean."""
    rows, columns = (-(-length // block) for length in weight.shape)
    generator = torch.Generator().manual_seed(weight.numel())
    scales = torch.rand(rows, columns, generator=generator) + 0.5
    each = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
    values = (weight.float() / each).to(torch.float8_e4m3fn)
    return values, scales, (values.float() * each).to(torch.bfloat16)


def save_fp8(name: str, folder: Path, block: int = BLOCK) -> dict[str, torch.Tensor]:
    """Save the model ``name`` with FP8 layers, as DeepSeek publishes its own; return the values of its layers."""
    make(name).to(torch.bfloat16).save_pretrained(folder)
    tensors, meant = load_file(folder / "model.safetensors"), {}
    for key, tensor in list(tensors.items()):
        if ".layers." in key and tensor.ndim == 2:
            tensors[key], tensors[f"{key}_scale_inv"], meant[key] = in_blocks(tensor, block)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    configure(folder, quantization_config={**FP8, "weight_block_size": [block, block]})
    return meant


def test_fp8_is_dequantised_as_by_transformers(tmp_path: Path) -> None:
    name = "mixtral"
    save_fp8(name, tmp_path)
    asked = transformers.FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK), dequantize=True)
    kind: Any = type(make(name))
    theirs = kind.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=asked)
    expected = theirs.state_dict()
    assert {tensor.dtype for tensor in expected.values()} == {torch.bfloat16}

    for rank, model in [(0, make(name, seed=5)), (1, on_meta(name))]:
        wrapped = wrap_as(rank, 2, model.to(torch.bfloat16))
        with pytest.raises(ValueError, match=r"config.json says that the weights are quantized \(fp8\)\. Nothing was"):
            load_pretrained(wrapped, tmp_path)
        # The remedy of the message.
        assert not load_pretrained(wrapped, tmp_path, dequantize=True)
        assert differing(wrapped.local_state_dict(), expected) == []


def test_a_divided_weight_is_dequantised(tmp_path: Path) -> None:
    """The 32 and 48 columns of Llama are in blocks of 20: those at the end are smaller."""
    meant = save_fp8("llama", tmp_path, block=20)
    parallel_state.initialize_debug(tensor_model_parallel_rank=1, tensor_model_parallel_size=2)
    wrapped = NxDPPModel(tensor_parallelize(on_meta("llama").to(torch.bfloat16)))
    load_pretrained(wrapped, tmp_path, dequantize=True)
    name = "model.layers.0.mlp.up_proj.weight"

    assert torch.equal(wrapped.local_state_dict()[name], meant[name].chunk(2)[1])


def test_a_save_is_not_quantised(tmp_path: Path) -> None:
    save_fp8("mixtral", tmp_path / "fp8")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "fp8")
    assert hasattr(config, "quantization_config")
    parallel_state.initialize_model_parallel()
    model: Any = transformers.MixtralForCausalLM(config)
    wrapped = NxDPPModel(model.to(torch.bfloat16))
    load_pretrained(wrapped, tmp_path / "fp8", dequantize=True)
    save_pretrained(wrapped, tmp_path / "ours")

    assert "quantization_config" not in (tmp_path / "ours" / "config.json").read_text()
    make("mixtral").save_pretrained(tmp_path / "plain")
    assert tensors_in(tmp_path / "ours").keys() == tensors_in(tmp_path / "plain").keys()
    again = type(make("mixtral")).from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    assert differing(wrapped.local_state_dict(), again.state_dict()) == []


def gpt_oss() -> Any:
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_local_experts=2,
            num_experts_per_tok=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=64,
            layer_types=["sliding_attention", "full_attention"],
        )
    )


def test_mxfp4_is_dequantised_as_by_transformers(tmp_path: Path) -> None:
    model: Any = initialised(gpt_oss()).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 130, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    configure(tmp_path, quantization_config={"quant_method": "mxfp4"})
    asked = Mxfp4Config(dequantize=True)
    kind: Any = transformers.GptOssForCausalLM
    theirs = kind.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=asked)

    wrapped = wrap_as(1, 2, gpt_oss().to(torch.bfloat16))
    load_pretrained(wrapped, tmp_path, dequantize=True)
    assert differing(wrapped.local_state_dict(), theirs.state_dict()) == []


def test_small_numbers_in_the_place_of_a_weight(tmp_path: Path) -> None:
    """Of FP8 without its configuration, with names of HQQ, and under the name of a weight: no initial weights."""
    save_fp8("llama", tmp_path)
    configure(tmp_path, quantization_config=None)
    wrapped = wrap_as(0, 1, on_meta("llama").to(torch.bfloat16))
    accepting: dict[str, Any] = {"strict": False, "ignore_mismatched_sizes": True, "convert_dtype": True}
    with pytest.raises(ValueError, match=r"scale_inv in .* is a part of a quantized weight, and config.json names"):
        load_pretrained(wrapped, tmp_path, dequantize=True, **accepting)
    make("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    owner = "model.layers.1.mlp.up_proj."
    small = tensors.pop(f"{owner}weight").to(torch.uint8)
    others = {f"{owner}W_q": small, f"{owner}scale": torch.ones(48)}
    for changed, message in (
        (others, f"has {owner}W_q of torch.uint8 and no {owner}weight, which is quantized"),
        ({f"{owner}weight": small}, rf"1 of another dtype(.|\n)*{owner}weight \(torch.uint8 in the checkpoint"),
    ):
        save_file(tensors | changed, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            load_pretrained(wrapped, tmp_path, dequantize=True, **accepting)
    assert all(parameter.is_meta for parameter in wrapped.local_parameters())
