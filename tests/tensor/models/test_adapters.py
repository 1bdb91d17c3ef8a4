"""LoRA of PEFT over two tensor-parallel ranks: numbers and files are those of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from nxdpp import (
    NxDPPModel,
    check_tensor_parallel,
    load_pretrained,
    parallel_state,
    save_pretrained,
    tensor_parallelize,
)
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import batch, differing, make

peft: Any = pytest.importorskip("peft")

TARGETS = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj", "lm_head"]


def _adapted(seed: int = 0, **changes: Any) -> Any:
    """A Llama with low-rank matrices that are not zero."""
    model = make("llama", seed)
    torch.manual_seed(seed + 1)
    model = peft.get_peft_model(model, peft.LoraConfig(**({"r": 4, "target_modules": TARGETS} | changes)))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def _wrap(seed: int) -> NxDPPModel:
    return NxDPPModel(tensor_parallelize(_adapted(seed)), num_microbatches=2, transformer_layer_cls="LlamaDecoderLayer")


def _cases(rank: int, folder: Path) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    assert check_tensor_parallel(_adapted(), batch())[0] < 1e-12
    whole = _adapted()
    if dist.get_rank() == 0:
        whole.save_pretrained(folder / "theirs")
        make("llama").save_pretrained(folder / "base")
    dist.barrier()
    model = _wrap(7)
    assert differing(dict(model.local_named_parameters()), whole)
    load_pretrained(model, folder / "base")
    load_pretrained(model, folder / "theirs")
    assert not differing(dict(model.local_named_parameters()), whole)
    save_pretrained(model, folder / "ours")
    dist.barrier()
    saved, expected = (load_file(folder / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())
    loss = model.run_train(**batch())
    if model.holds_last_stage:
        torch.testing.assert_close(loss, whole(**batch()).loss.detach(), rtol=1e-5, atol=0)
    parallel_state.destroy_model_parallel()


def test_low_rank_matrices_are_divided_with_their_layers(tmp_path: Path) -> None:
    run_ranks(2, _cases, tmp_path)


@pytest.mark.usefixtures("one_of_two")
class TestOneOfTwo:
    @pytest.mark.parametrize(
        "changes",
        [
            {"use_dora": True},
            {"modules_to_save": ["q_proj"], "target_modules": ["v_proj"]},
        ],
    )
    def test_other_adapters(self, changes: dict[str, Any]) -> None:
        model = _adapted(**changes)
        with pytest.raises(ValueError, match=r"has an adapter of .* must be LoRA of linear layers.*merge_and_unload"):
            tensor_parallelize(model)
        if "modules_to_save" not in changes:
            # The remedy.
            merged = tensor_parallelize(model.merge_and_unload())
            assert merged.model.layers[0].self_attn.q_proj.weight.shape == (16, 32)

    def test_a_divided_sequence(self) -> None:
        model = _adapted()
        with pytest.raises(ValueError, match=r"adapters were not compared with sequence_parallel=True: merge_and_unl"):
            tensor_parallelize(model, sequence_parallel=True)
        tensor_parallelize(model.merge_and_unload(), sequence_parallel=True)
