"""``init_on_device``: meta parameters, buffers with values, and no state after the context."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

import nxdpp.utils.model_utils
from nxdpp import deferred_init, init_on_device
from tests.support.llama_405b import llama_3_1_405b
from tests.support.process_memory import peak_bytes, reset_peak, resident_bytes
from tools.zoo import build

META = torch.device("meta")


class Own(nn.Parameter):
    pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.own = Own(torch.ones(2))
        self.own.expert = 3  # type: ignore[attr-defined]
        self.tied = self.linear.weight
        self.count = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)))


def test_import_path_of_the_guide() -> None:
    assert nxdpp.utils.model_utils.init_on_device is init_on_device
    assert nxdpp.utils.model_utils.deferred_init is deferred_init


def test_parameters_keep_identity_class_and_attributes() -> None:
    with init_on_device("meta"):
        block = Block()
        assert all(parameter.is_meta for parameter in block.parameters())
    assert block.tied is block.linear.weight
    assert type(block.own) is Own
    assert block.own.expert == 3  # type: ignore[attr-defined]
    assert block.linear.weight.requires_grad
    assert not block.frozen.requires_grad
    assert block.count.dtype == torch.int64
    assert torch.equal(block.get_buffer("mask"), torch.tril(torch.ones(3, 3)))
    assert not any(parameter.is_meta for parameter in Block().parameters())


def test_nested_and_after_an_error() -> None:
    with init_on_device(META):
        with init_on_device("cpu"):
            real = nn.Linear(2, 2)
        with init_on_device(META):
            inner = nn.Linear(2, 2)
        with pytest.raises(RuntimeError, match="on purpose"), init_on_device(META):
            raise RuntimeError("on purpose")
        outer = nn.Linear(2, 2)
    assert not real.weight.is_meta
    assert inner.weight.is_meta
    assert outer.weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_the_published_405b_llama_takes_no_memory() -> None:
    reset_peak()
    before = resident_bytes()
    with init_on_device(META):
        model = LlamaForCausalLM(llama_3_1_405b())
    assert peak_bytes() - before < 100 * 2**20
    assert sum(parameter.numel() for parameter in model.parameters()) == 405_853_388_800
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("model_type", ["gpt2", "mamba", "t5gemma"])
def test_transformers_models(model_type: str) -> None:
    task = "seq2seq-lm" if model_type == "t5gemma" else "causal-lm"
    eager = build(task, model_type)
    with init_on_device(META):
        model: PreTrainedModel = type(eager)(eager.config)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not [name for name, module in model.named_modules() if "_is_hf_initialized" in vars(module)]
    buffers = dict(eager.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    # A later initialisation needs memory, and no mark that it was done.
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    model.initialize_weights()
    unset = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    assert not unset


def test_loaded_parameters_are_not_discarded(tmp_path: Path) -> None:
    eager = build("causal-lm", "gpt2")
    eager.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"would discard.*nxdpp\.load_pretrained"), init_on_device(META):
        type(eager).from_pretrained(tmp_path)


@pytest.mark.parametrize("device", [None, True])
def test_invalid_devices(device: object) -> None:
    with pytest.raises(TypeError, match=r"device must be a torch\.device"), init_on_device(device):  # type: ignore[arg-type]
        pass


def test_parameters_that_cannot_move_to_meta() -> None:
    with init_on_device(META), pytest.raises(ValueError, match="weight of LazyLinear is lazy"):
        nn.LazyLinear(3)

    def with_a_view() -> None:
        module, weight = nn.Module(), nn.Parameter(torch.ones(3))
        views.append(weight[:2])
        module.register_parameter("weight", weight)

    views: list[torch.Tensor] = []
    with init_on_device(META), pytest.raises(ValueError, match="weight of Module cannot move to the meta device"):
        with_a_view()


def test_deferred_init_and_init_on_device_exclude_each_other() -> None:
    def inside() -> nn.Module:
        with init_on_device(META):
            return nn.Linear(2, 2)

    with pytest.raises(RuntimeError, match="remove the inner context"):
        deferred_init(inside)
    with init_on_device(META), pytest.raises(ValueError, match="outside of init_on_device"):
        deferred_init(nn.Linear, 2, 2)
