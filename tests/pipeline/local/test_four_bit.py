"""Adapters over frozen 4-bit weights of bitsandbytes: numbers and bytes of one process, and both kinds of saves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Params4bit
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from nxdpp import NxDPPModel, load_checkpoint, parallel_state, save_checkpoint, save_pretrained
from nxdpp.pipeline.local.elsewhere_tensors import parameter_elsewhere
from tests.support.run_ranks import run_ranks

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
)  # fmt: skip


def quantized(folder: Path) -> Any:
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(load_in_4bit=True), dtype=torch.float32
    )
    torch.manual_seed(0)
    # In eval mode bitsandbytes packs weights for the CPU, and a state dict unpacks them with rounding.
    return get_peft_model(loaded.train(), LoraConfig(target_modules="all-linear", init_lora_weights=False))


def tune(rank: int, folder: Path) -> tuple[int, int]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    whole = quantized(folder)
    model = NxDPPModel(quantized(folder), num_microbatches=4, broadcast_and_average_loss=True)
    ids = torch.arange(8 * 16).view(8, 16) % 64
    optimizers = [
        torch.optim.AdamW([each for each in one.parameters() if each.requires_grad], lr=1e-2) for one in (model, whole)
    ]
    for _ in range(2):
        losses = [whole(input_ids=part, labels=part, use_cache=False).loss for part in ids.chunk(4)]
        for loss in losses:
            (loss / 4).backward()
        assert torch.equal(model.run_train(input_ids=ids, labels=ids), torch.stack(losses).mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    save_pretrained(model, folder / "adapters")
    save_checkpoint(str(folder / "saved"), "last", model, optimizers[0])
    again = NxDPPModel(quantized(folder), num_microbatches=4, broadcast_and_average_loss=True)
    load_checkpoint(str(folder / "saved"), "last", again)
    assert torch.equal(*(each.run_train(input_ids=ids, labels=ids) for each in (again, model)))
    sizes = [sum(each.nbytes for each in one) for one in (model.local_parameters(), whole.parameters())]
    return sizes[0], sizes[1]


def test_numbers_bytes_and_saves(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = LlamaForCausalLM(CONFIG)
    whole.save_pretrained(tmp_path)
    found = run_ranks(2, tune, tmp_path)
    assert all(part < 0.51 * four_bit for part, four_bit in found)
    layers = sum(each.nbytes for name, each in whole.named_parameters() if "layers" in name)
    assert found[0][1] < 0.6 * layers
    tuned = PeftModel.from_pretrained(quantized(tmp_path).unload(), tmp_path / "adapters")
    assert any(bool(value.any()) for name, value in tuned.named_parameters() if "lora_B" in name)


def test_a_weight_that_is_not_quantised_yet_is_saved(tmp_path: Path) -> None:
    saved, loaded = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))
    for each in (saved, loaded):
        each.weight = Params4bit(each.weight.data, requires_grad=False)
    save_checkpoint(str(tmp_path), "last", saved)
    load_checkpoint(str(tmp_path), "last", loaded)
    assert torch.equal(saved.weight, loaded.weight)
    loaded.weight = Params4bit(torch.empty(4, 4, device="meta"), requires_grad=False)
    with pytest.raises(ValueError, match="weight is a 4-bit weight on the meta device, and a checkpoint has no values"):
        load_checkpoint(str(tmp_path), "last", loaded)


def test_parts_of_tensors_over_ranks_are_refused(one_rank: None) -> None:
    part = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"^layer\.weight is a DTensor.*before fully_shard"):
        parameter_elsewhere(torch.nn.Parameter(part), "layer.weight")


def test_weights_that_stand_for_several_tensors_are_refused() -> None:
    two = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"layer\.weight is a NestedTensor.*BitsAndBytesConfig"):
        parameter_elsewhere(torch.nn.Parameter(two), "layer.weight")
