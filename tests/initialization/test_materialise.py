"""Initial weights of meta tensors from ``param_init_fn``, ``_init_weights`` and ``reset_parameters``."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp.initialization.materialise import MetaTensor, initial_weights


class Scale(nn.Module):
    """Module with ``reset_parameters`` and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(6))
        self.register_buffer("steps", torch.empty(3, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.factor)
        self.get_buffer("steps").copy_(torch.arange(3))


class Reaching(nn.Module):
    """Module that initialises itself and its children, these with another spread than their own."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(4))
        self.register_buffer("factor", torch.empty(2), persistent=False)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.position)
        self.get_buffer("factor").fill_(3.0)
        for linear in (self.first, self.second):
            nn.init.normal_(linear.weight, std=0.01)


class Bare(nn.Module):
    """Module without ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(5))
        self.register_buffer("mask", torch.ones(4, 4).tril(), persistent=False)


def on_meta(make: Any, *arguments: Any) -> Any:
    with torch.device("meta"):
        return make(*arguments)


def meta_tensors(root: nn.Module) -> list[MetaTensor]:
    tensors = [*root.named_parameters(), *root.named_buffers()]
    return [MetaTensor(name, tensor) for name, tensor in tensors if tensor.is_meta]


def fill(root: nn.Module, function: Any = None, seed: int = 0, part: str = "") -> dict[str, torch.Tensor]:
    wanted = [meta for meta in meta_tensors(root) if meta.name.startswith(part)]
    before = {meta.name: meta.tensor for meta in meta_tensors(root)}
    values, _ = initial_weights(root, wanted, seed, function)
    assert {meta.name: meta.tensor for meta in meta_tensors(root)} == before
    return dict(zip([meta.name for meta in wanted], values, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.PReLU()),
        lambda: nn.LSTM(4, 5, 2),
        lambda: nn.Embedding(6, 4, padding_idx=2),
        lambda: nn.TransformerEncoderLayer(8, 2, 16),
        Scale,
    ],
)
def test_modules_initialise_themselves(make: Any) -> None:
    values = fill(on_meta(make))
    eager = make()

    assert set(values) == {*dict(eager.named_parameters()), *dict(eager.named_buffers())}
    for name, value in values.items():
        expected = eager.get_parameter(name) if name in dict(eager.named_parameters()) else eager.get_buffer(name)
        assert value.dtype == expected.dtype
        assert isinstance(value, nn.Parameter) == isinstance(expected, nn.Parameter)
        if expected.unique().numel() == 1 or not expected.is_floating_point():
            assert torch.equal(value, expected), name
        else:
            assert value.std() > 0
            assert not value.isnan().any()


def test_transformers_model_initialises_weights_and_unsaved_buffers() -> None:
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    values, eager = fill(on_meta(LlamaForCausalLM, config)), LlamaForCausalLM(config)

    assert torch.equal(values["model.rotary_emb.inv_freq"], eager.model.rotary_emb.inv_freq)
    assert torch.equal(values["model.layers.1.input_layernorm.weight"], torch.ones(64))
    assert not values["model.embed_tokens.weight"][0].any()
    spread = values["model.layers.0.mlp.up_proj.weight"].std().item()
    assert abs(spread - config.initializer_range) < 0.1 * config.initializer_range


def test_tensors_without_initialisation_are_named() -> None:
    root = on_meta(lambda: nn.Sequential(nn.Linear(2, 3), Bare()))

    with pytest.raises(RuntimeError) as caught:
        fill(root)

    assert "2 parameters or buffers are left without values" in str(caught.value)
    assert "1.bias of Bare: 5 of 5 elements" in str(caught.value)
    assert "1.mask of Bare: 16 of 16 elements" in str(caught.value)
    assert "Give the modules a reset_parameters() that writes them" in str(caught.value)
    assert all(tensor.is_meta for tensor in (*root.parameters(), *root.buffers()))


def test_an_error_in_the_function_names_the_module_and_changes_nothing() -> None:
    root = on_meta(lambda: nn.Sequential(nn.Linear(2, 3)))

    def fail(module: nn.Module) -> None:
        raise KeyError("no such thing")

    with pytest.raises(KeyError) as caught:
        fill(root, fail)

    assert caught.value.__notes__ == ["in param_init_fn, called for 0"]
    assert all(parameter.is_meta for parameter in root.parameters())


def normal_below(module: nn.Module) -> None:
    """Initialise the parameters of the module and of its children."""
    for parameter in module.parameters():
        nn.init.normal_(parameter)


@pytest.mark.parametrize("function", [None, normal_below])
def test_a_parent_initialises_children_on_any_rank(function: Any) -> None:
    root = on_meta(Reaching)
    whole = fill(root, function)

    for part in ("position", "first", "second"):
        values = fill(root, function, part=part)
        assert values
        assert all(torch.equal(value, whole[name]) for name, value in values.items())
    assert (whole["second.weight"].abs().max() < 0.1) == (function is None)


@pytest.mark.parametrize("surroundings", [lambda: torch.device("meta"), torch.inference_mode])
def test_the_context_of_the_caller_has_no_effect(surroundings: Any) -> None:
    def from_a_temporary(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.copy_(torch.randn(parameter.shape))

    root = on_meta(lambda: nn.Sequential(nn.Linear(5, 7), Scale()))
    with surroundings():
        values = [fill(root), fill(root, from_a_temporary)]

    for inside, outside in zip(values, [fill(root), fill(root, from_a_temporary)], strict=True):
        assert all(torch.equal(value, outside[name]) for name, value in inside.items())
        assert not any(value.is_inference() for value in inside.values())


def test_new_memory_of_a_function_is_unwritten() -> None:
    garbage = [torch.full((300, 300), 7.0) for _ in range(8)]
    del garbage

    with pytest.raises(RuntimeError, match=r"0.weight of Linear: 90000 of 90000 elements\n  0.bias"):
        fill(on_meta(lambda: nn.Sequential(nn.Linear(300, 300))), lambda module: module.to_empty(device="cpu"))

    def then_reset(module: nn.Module, device: torch.device) -> None:
        module.to_empty(device=device, recurse=False)
        module.reset_parameters()  # type: ignore[operator]

    values = fill(on_meta(nn.Linear, 4, 7), then_reset)
    assert all(0 < value.abs().max() <= 0.5 for value in values.values())


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(3, 2, dtype=torch.float64)])
def test_other_shapes_and_dtypes_are_refused(value: torch.Tensor) -> None:
    def replace(module: nn.Module) -> None:
        module.weight = nn.Parameter(value)
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    with pytest.raises(RuntimeError, match=r"^0.weight is torch.float32 of \[3, 2\] in the model, and was replaced by"):
        fill(on_meta(lambda: nn.Sequential(nn.Linear(2, 3))), replace)


def test_a_replacement_keeps_the_attributes_of_the_parameter() -> None:
    root = on_meta(nn.Linear, 2, 3)
    root.weight.partition_dim = 1
    root.weight.requires_grad_(False)

    def replace(module: nn.Module) -> None:
        module.weight = nn.Parameter(torch.ones(3, 2))
        module.bias = nn.Parameter(torch.ones(3), requires_grad=False)

    values = fill(root, replace)

    assert values["weight"].partition_dim == 1  # type: ignore[attr-defined]
    assert not values["weight"].requires_grad
    assert not values["bias"].requires_grad
    assert torch.equal(values["weight"], torch.ones(3, 2))


def test_tensors_with_values_do_not_change() -> None:
    root = on_meta(nn.Linear, 4, 4)
    root.weight = nn.Parameter(torch.full((4, 4), 7.0))
    llama = on_meta(
        LlamaForCausalLM,
        LlamaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, intermediate_size=8, num_attention_heads=2),
    )
    llama.lm_head.weight = nn.Parameter(torch.full((9, 8), 7.0))

    assert set(fill(root)) == {"bias"}
    assert torch.equal(root.weight, torch.full((4, 4), 7.0))
    assert "lm_head.weight" not in fill(llama)
    assert torch.equal(llama.lm_head.weight, torch.full((9, 8), 7.0))
    assert not hasattr(llama.lm_head.weight, "_is_hf_initialized")
