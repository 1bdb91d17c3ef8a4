"""``load_pretrained``: a rank reads only its own tensors, and parameters keep dtype, class and attributes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nxdpp import NxDPPModel, load_pretrained, parallel_state, save_pretrained
from nxdpp.checkpoint.files.safetensors_reader import OpenFile, StoredTensor
from tests.checkpoint.huggingface.checkpointed_models import differing, make, on_meta, saved_by_transformers, wrap
from tests.support.models import llama
from tests.support.wrapped_models import RewardHead, initialised


@pytest.fixture(autouse=True)
def no_groups_left() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def wrap_as(rank: int, ranks: int, model: nn.Module, **arguments: Any) -> NxDPPModel:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_debug(pipeline_model_parallel_rank=rank, pipeline_model_parallel_size=ranks)
    return NxDPPModel(model, num_microbatches=ranks, **arguments)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Name, first and last byte of all parts of tensors that are read."""
    parts = []
    read = OpenFile.read

    def noting(self: OpenFile, stored: StoredTensor, start: int, into: memoryview) -> None:
        parts.append((stored.name, start, start + len(into)))
        read(self, stored, start, into)

    monkeypatch.setattr(OpenFile, "read", noting)
    return parts


@pytest.mark.parametrize("name", ["llama", "tied_llama", "mixtral"])
def test_a_rank_reads_its_own_tensors_once(name: str, tmp_path: Path, read: list[tuple[str, int, int]]) -> None:
    saved_by_transformers(name, tmp_path, max_shard_size="100KB")
    counts = []
    for rank in range(4):
        model = wrap_as(rank, 4, on_meta(name))
        load_pretrained(model, tmp_path)
        assert len(read) == len(set(read))
        counts.append(sum(stop - start for _, start, stop in read))
        assert counts[-1] == sum(parameter.nbytes for parameter in model.local_parameters())
        read.clear()
    assert len(set(counts)) > 1


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_values_have_the_dtypes_of_the_model(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    # Mixtral has tensors that are converted, and plain ones.
    for name in ("llama", "mixtral") if stored == torch.float32 else ("mixtral",):
        make(name).to(stored).save_pretrained(tmp_path / name)
        expected = type(make(name)).from_pretrained(tmp_path / name, dtype=wanted).state_dict()
        for model in (make(name, seed=5).to(wanted), on_meta(name).to(wanted)):
            wrapped = wrap_as(0, 1, model)
            load_pretrained(wrapped, tmp_path / name, convert_dtype=True)
            assert differing(wrapped.local_state_dict(), expected) == []
            assert {parameter.dtype for parameter in wrapped.local_parameters()} == {wanted}


class Marked(nn.Parameter):
    """Subclass of ``nn.Parameter``."""


def test_meta_parameters_keep_class_and_attributes(tmp_path: Path) -> None:
    saved_by_transformers("tied_llama", tmp_path)
    model = on_meta("tied_llama")
    head = Marked(torch.empty_like(model.lm_head.weight), requires_grad=False)
    vars(head)["tensor_model_parallel"] = True
    model.lm_head.weight = model.model.embed_tokens.weight = head
    wrapped = wrap_as(0, 1, model)
    load_pretrained(wrapped, tmp_path)
    loaded = wrapped.local_module.get_parameter("lm_head.weight")

    assert type(loaded) is Marked
    assert vars(loaded)["tensor_model_parallel"] is True
    assert not loaded.requires_grad
    assert loaded is wrapped.local_module.get_parameter("model.embed_tokens.weight")
    assert loaded is model.lm_head.weight
    assert model.model.norm.weight is dict(wrapped.local_named_parameters())["model.norm.weight"]
    assert model.model.norm.weight.requires_grad


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


def test_a_loaded_layer_trains(tmp_path: Path) -> None:
    saved_by_transformers("llama", tmp_path)
    wrapped = wrap(on_meta("llama"))
    assert isinstance(llama(), type(wrapped.original_module))
    load_pretrained(wrapped, tmp_path)
    ids = torch.arange(16).view(2, 8)
    loss = wrapped.run_train(input_ids=ids, labels=ids)
    expected = make("llama")(input_ids=ids, labels=ids).loss

    assert isinstance(loss, torch.Tensor)
    assert torch.equal(loss, expected.detach())


def test_parameters_loaded_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    saved_by_transformers("llama", tmp_path)
    model = wrap(on_meta("llama"), 1)
    with torch.inference_mode():
        load_pretrained(model, tmp_path)

    assert not any(parameter.is_inference() for parameter in model.local_parameters())


def test_a_module_around_a_model_has_its_own_names(tmp_path: Path) -> None:
    module: Any = initialised(RewardHead())
    save_pretrained(wrap(module), tmp_path / "module")
    module.model.save_pretrained(tmp_path / "model")
    other: Any = initialised(RewardHead(), seed=5)

    with pytest.raises(ValueError, match=r"not those of this RewardHead(.|\n)*around CLASS\.from_pretrained"):
        load_pretrained(wrap(other), tmp_path / "model")
    load_pretrained(wrap(other), tmp_path / "module")
    assert differing(other.state_dict(), module.state_dict()) == []

    # The remedy.
    other.model = type(module.model).from_pretrained(tmp_path / "model")
    assert differing(other.model.state_dict(), module.model.state_dict()) == []
