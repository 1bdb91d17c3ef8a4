"""Adapters over frozen quantized weights of bitsandbytes and torchao: numbers of one process, and both saves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Params4bit
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from nxdpp import NxDPPModel, gather_state_dict, load_checkpoint, parallel_state, save_checkpoint, save_pretrained
from tests.support.run_ranks import run_ranks

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2
)  # fmt: skip


def quantized(folder: Path) -> Any:
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(load_in_4bit=True), dtype=torch.float32
    )
    torch.manual_seed(0)
    # In eval mode bitsandbytes packs weights for the CPU, and a state dict unpacks them with rounding.
    return get_peft_model(loaded.train(), LoraConfig(target_modules="all-linear", init_lora_weights=False))


class Coded(torch.Tensor):
    """A weight in 8 bits, in the way of torchao's: of torch's functions it knows only what a frozen weight needs."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> "Coded":
        made: Coded = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes = codes
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> "Coded":
        return Coded(inner["codes"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            return func(args[0], args[1].codes.float() / 500, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # as torch calls it
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(func)


Coded.__module__ = "torchao.coded"


def coded(folder: Path) -> Any:
    torch.manual_seed(0)
    loaded = LlamaForCausalLM.from_pretrained(folder)
    for layer in loaded.model.layers:
        for each in layer.modules():
            if isinstance(each, torch.nn.Linear):
                each.weight = torch.nn.Parameter(Coded((each.weight.data * 500).char()), requires_grad=False)
                # As torchao does: the texts of the ranks' models differ.
                vars(each)["extra_repr"] = lambda each=each: str(type(each.weight))
    return get_peft_model(loaded.train(), LoraConfig(target_modules="all-linear", init_lora_weights=False))


def tune_both(rank: int, folder: Path) -> list[tuple[int, int]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    found = [tune(folder, quantized), tune(folder, coded)]
    with pytest.raises(NotImplementedError, match="saving quantized models is not implemented"):
        save_pretrained(NxDPPModel(coded(folder).unload(), num_microbatches=2), folder / "whole")
    return found


def tune(folder: Path, quantized: Callable[[Path], Any]) -> tuple[int, int]:
    whole = quantized(folder)
    model = NxDPPModel(quantized(folder), num_microbatches=2, broadcast_and_average_loss=True)
    ids = torch.arange(4 * 8).view(4, 8) % 64
    optimizers = [
        torch.optim.AdamW([each for each in one.parameters() if each.requires_grad], lr=1e-2) for one in (model, whole)
    ]
    for _ in range(2):
        losses = [whole(input_ids=part, labels=part, use_cache=False).loss for part in ids.chunk(2)]
        for loss in losses:
            (loss / 2).backward()
        assert torch.equal(model.run_train(input_ids=ids, labels=ids), torch.stack(losses).mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    save_pretrained(model, folder / "adapters")
    save_checkpoint(str(folder / "saved"), "last", model, optimizers[0])
    again = NxDPPModel(quantized(folder), num_microbatches=2, broadcast_and_average_loss=True)
    load_checkpoint(str(folder / "saved"), "last", again)
    assert torch.equal(*(each.run_train(input_ids=ids, labels=ids) for each in (again, model)))
    frozen: Any = next(each for each in again.local_parameters() if isinstance(each, Params4bit | Coded))
    (frozen.codes if isinstance(frozen, Coded) else frozen.data).bitwise_xor_(1)
    with pytest.raises(ValueError, match=r"is a quantized weight.*other values than the saved model's. Nothing"):
        load_checkpoint(str(folder / "saved"), "last", again)
    with pytest.raises(ValueError, match="is a quantized weight, and only dense tensors are gathered"):
        gather_state_dict(model)
    if quantized is not coded:
        tokens = whole.eval().generate(input_ids=ids[:1, :4], max_new_tokens=2)
        assert torch.equal(model.eval().generate(input_ids=ids[:1, :4], max_new_tokens=2), tokens)
        # bitsandbytes has arranged the weights anew.
        load_checkpoint(str(folder / "saved"), "last", model)
    sizes = [sum(each.nbytes for each in one) for one in (model.local_parameters(), whole.parameters())]
    return sizes[0], sizes[1]


@pytest.mark.cpu_only("bitsandbytes and PEFT put their tensors on the devices that they know")
def test_numbers_bytes_and_saves(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = LlamaForCausalLM(CONFIG)
    whole.save_pretrained(tmp_path)
    found = run_ranks(2, tune_both, tmp_path)
    assert all(part < 0.51 * four_bit for (part, four_bit), _ in found)
    layers = sum(each.nbytes for name, each in whole.named_parameters() if "layers" in name)
    assert found[0][0][1] < 0.6 * layers
    tuned = PeftModel.from_pretrained(quantized(tmp_path).unload(), tmp_path / "adapters")
    assert any(bool(value.any()) for name, value in tuned.named_parameters() if "lora_B" in name)
