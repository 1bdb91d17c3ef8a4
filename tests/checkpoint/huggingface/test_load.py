"""``load_pretrained``: a rank reads only its own tensors, and parameters keep dtype, class and attributes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nxdpp import load_pretrained
from tests.checkpoint.huggingface.checkpointed_models import differing, make, on_meta, saved_by_transformers, wrap_as

pytestmark = pytest.mark.usefixtures("no_groups_left")


@pytest.mark.parametrize(("stored", "wanted"), [(torch.bfloat16, torch.float32), (torch.float64, torch.bfloat16)])
def test_values_have_the_dtypes_of_the_model(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    """Mixtral has tensors that are converted, and plain ones."""
    make("mixtral").to(stored).save_pretrained(tmp_path)
    expected = type(make("mixtral")).from_pretrained(tmp_path, dtype=wanted).state_dict()
    for model in (make("mixtral", seed=5).to(wanted), on_meta("mixtral").to(wanted)):
        wrapped = wrap_as(0, 1, model)
        load_pretrained(wrapped, tmp_path, convert_dtype=True)
        assert differing(wrapped.local_state_dict(), expected) == []
        assert {parameter.dtype for parameter in wrapped.local_parameters()} == {wanted}


class Marked(nn.Parameter):
    """Subclass of ``nn.Parameter``."""


def test_meta_parameters_keep_class_and_attributes_and_can_be_trained(tmp_path: Path) -> None:
    saved_by_transformers("tied_llama", tmp_path)
    model = on_meta("tied_llama")
    head = Marked(torch.empty_like(model.lm_head.weight), requires_grad=False)
    vars(head)["tensor_model_parallel"] = True
    model.lm_head.weight = model.model.embed_tokens.weight = head
    wrapped = wrap_as(0, 1, model)
    with torch.inference_mode():
        load_pretrained(wrapped, tmp_path)
    loaded = wrapped.local_module.get_parameter("lm_head.weight")

    assert type(loaded) is Marked
    assert vars(loaded)["tensor_model_parallel"] is True
    assert not loaded.requires_grad
    assert loaded is wrapped.local_module.get_parameter("model.embed_tokens.weight")
    assert loaded is model.lm_head.weight
    assert model.model.norm.weight is dict(wrapped.local_named_parameters())["model.norm.weight"]
    assert model.model.norm.weight.requires_grad
    assert not any(parameter.is_inference() for parameter in wrapped.local_parameters())


def test_an_optimizer_of_parameters_on_meta_is_named(tmp_path: Path) -> None:
    saved_by_transformers("llama", tmp_path)
    wrapped = wrap_as(0, 2, on_meta("llama"))
    optimizer = torch.optim.SGD(wrapped.local_parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"an optimizer, SGD, holds \d+ of the \d+ parameters"):
        load_pretrained(wrapped, tmp_path)

    assert all(parameter.is_meta for group in optimizer.param_groups for parameter in group["params"])
    assert all(parameter.is_meta for parameter in wrapped.local_parameters())


def test_real_parameters_keep_memory_that_is_not_contiguous(tmp_path: Path) -> None:
    expected = saved_by_transformers("llama", tmp_path)
    model = make("llama", seed=5)
    weight = nn.Parameter(torch.zeros(48, 32).t().contiguous().t())
    assert not weight.is_contiguous()
    model.model.layers[0].mlp.up_proj.weight = weight
    wrapped = wrap_as(0, 1, model)
    load_pretrained(wrapped, tmp_path)

    assert model.model.layers[0].mlp.up_proj.weight is weight
    assert not weight.is_contiguous()
    assert torch.equal(weight, expected.model.layers[0].mlp.up_proj.weight)


class AllKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.float64, torch.complex64):
            self.register_buffer(str(dtype).removeprefix("torch."), torch.zeros(3, dtype=dtype))
        self.register_buffer("scalar", torch.tensor(0.0))
        self.register_buffer("empty", torch.zeros(0, 3))
        # Several pieces, but few rows.
        self.register_buffer("wide", torch.zeros(1, 2**23 + 5, dtype=torch.uint8))
        self.register_buffer("wide_too", torch.zeros(3, 1, 2**21, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_all_kinds_of_buffers(tmp_path: Path) -> None:
    stored = {
        name: torch.arange(tensor.numel()).view(tensor.shape).to(tensor.dtype)
        for name, tensor in AllKinds().state_dict().items()
    }
    save_file(stored, tmp_path / "model.safetensors")
    wrapped = wrap_as(0, 1, AllKinds(), transformer_layer_cls=nn.Linear)
    load_pretrained(wrapped, tmp_path)

    assert wrapped.local_state_dict().keys() == stored.keys()
    assert differing(wrapped.local_state_dict(), stored) == []
