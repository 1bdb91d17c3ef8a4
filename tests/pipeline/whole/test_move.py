"""Moves: local tensors change device, copies of a tied weight are equal, unmoved parameters stay the same."""

import time

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.local import equal_copies
from tests.pipeline.local.test_tied_weights import Layer, SeveralTies
from tests.support.models import make, padded_batch, reference
from tests.support.run_ranks import run_ranks


def start(stages: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)


def several_ties() -> SeveralTies:
    torch.manual_seed(0)
    model = SeveralTies()
    model.blocks = nn.ModuleList(Layer(4, 4) for _ in range(3))
    return model


def make_equal(rank: int, dtype: torch.dtype, transposed: bool) -> None:
    start(3)
    model = several_ties().to(dtype)
    wrapped = NxDPPModel(model, transformer_layer_cls=Layer)
    names = ["near.weight", "far.weight", "shared.weight", "near_twin.weight", "far_twin.weight"]
    with torch.no_grad():
        for name, parameter in wrapped.local_named_parameters():
            if transposed and name in names and rank == 1:
                parameter.data = parameter.data.t().contiguous().t()
            # One copy keeps its values.
            if name != "near_twin.weight":
                parameter.add_(rank)
    before = dict(wrapped.local_named_parameters())
    kept = {name: parameter.detach().clone() for name, parameter in before.items()}
    wrapped.move_model_to_device()
    first = several_ties().to(dtype).state_dict()
    for name, parameter in wrapped.local_named_parameters():
        assert parameter is before[name]
        expected = first[name] if name in names else kept[name]
        assert torch.equal(parameter, expected)
        assert parameter.requires_grad


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_get_the_values_of_the_first_owner(dtype: torch.dtype, transposed: bool) -> None:
    run_ranks(3, make_equal, dtype, transposed)


def large_copies(rank: int) -> None:
    start(2)
    wrapped = NxDPPModel(make("tied_llama"))
    equal_copies._PIECE_BYTES = 1000
    if rank == 1:
        with torch.no_grad():
            wrapped.local_module.get_parameter("lm_head.weight").zero_()
    wrapped.move_model_to_device()
    name = "model.embed_tokens.weight" if rank == 0 else "lm_head.weight"
    expected = make("tied_llama").state_dict()
    assert torch.equal(wrapped.local_module.get_parameter(name), expected[name])


def test_large_copy_is_sent_in_pieces() -> None:
    run_ranks(2, large_copies)


def move_three_times(rank: int) -> None:
    start(2)
    model = make("tied_llama")
    for parameter in model.parameters():
        parameter.tensor_model_parallel = True
    wrapped = NxDPPModel(model, num_microbatches=2)
    optimizer = torch.optim.AdamW(wrapped.local_parameters())
    wrapped.run_train(**padded_batch(4))
    before = dict(wrapped.local_named_parameters())
    values = {name: parameter.detach().clone() for name, parameter in before.items()}
    gradients = {name: parameter.grad for name, parameter in before.items()}
    for device in (None, "cpu", torch.device("cpu")):
        wrapped.move_model_to_device(device)
    for name, parameter in wrapped.local_named_parameters():
        assert parameter is before[name]
        assert parameter.grad is gradients[name]
        assert parameter.tensor_model_parallel  # type: ignore[attr-defined]
        assert torch.equal(parameter, values[name])
    optimizer.step()
    wrapped.run_train(**padded_batch(4))


def test_move_to_the_same_device_changes_nothing() -> None:
    run_ranks(2, move_three_times)


def cast_one_copy(rank: int) -> None:
    start(2)
    wrapped = NxDPPModel(make("tied_llama"))
    if rank == 1:
        wrapped.local_module.get_submodule("lm_head").to(torch.bfloat16)
    message = (
        r"torch.float32 of \[61, 32\] on pipeline rank 0 \(model.embed_tokens.weight\) and torch.bfloat16 of "
        r"\[61, 32\] on pipeline rank 1 \(lm_head.weight\)"
    )
    with pytest.raises(RuntimeError, match=message):
        wrapped.move_model_to_device()


def test_copies_of_different_dtypes_are_refused_on_all_ranks() -> None:
    run_ranks(2, cast_one_copy)


def refuse_devices(rank: int) -> None:
    start(2)
    wrapped = NxDPPModel(make("tied_llama"))
    before = dict(wrapped.local_named_parameters())
    for device, message in [("cuda:77", "no device 'cuda:77'"), ("near", "no device 'near'"), ("meta", "no memory")]:
        with pytest.raises(ValueError, match=message):
            wrapped.move_model_to_device(device)
    assert all(p is before[name] and not p.is_meta for name, p in wrapped.local_named_parameters())


def test_a_refused_device_changes_nothing() -> None:
    run_ranks(2, refuse_devices)


def other_seeds(rank: int, differs: bool) -> None:
    start(1)
    torch.manual_seed(rank if differs else 0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    wrapped = NxDPPModel(model, transformer_layer_cls=nn.Linear)
    if not differs:
        wrapped.move_model_to_device()
        return
    with pytest.raises(
        RuntimeError, match=r"data-parallel rank 1 .* has other parameters than .*\n.*values of 0.weight"
    ):
        wrapped.move_model_to_device()


@pytest.mark.parametrize("differs", [False, True])
def test_replicas_with_different_values_are_refused(differs: bool) -> None:
    run_ranks(2, other_seeds, differs)


def assign(rank: int) -> None:
    start(2)
    model = make("tied_llama")
    for parameter in model.parameters():
        parameter.tensor_model_parallel = True
    whole = reference(model)
    wrapped = NxDPPModel(model, num_microbatches=2)
    optimizer = torch.optim.AdamW(wrapped.local_parameters())
    before = dict(wrapped.local_named_parameters())
    halves = {name: value * 0.5 for name, value in wrapped.local_state_dict().items()}
    message = rf"AdamW, holds {len(before)} of the {len(before)} .*\({next(iter(before))} is the first"
    with pytest.raises(RuntimeError, match=message):
        wrapped.load_state_dict(halves, assign=True)
    assert all(parameter is before[name] for name, parameter in wrapped.local_named_parameters())
    wrapped.load_state_dict(dict(before), assign=True)
    del optimizer
    wrapped.load_state_dict(halves, assign=True)
    for name, parameter in wrapped.local_named_parameters():
        assert parameter is not before[name]
        assert parameter.tensor_model_parallel  # type: ignore[attr-defined]
        assert torch.equal(parameter, whole.state_dict()[name] * 0.5)
    assert wrapped.run_train(**padded_batch(4)) is not None or rank == 0
    with pytest.raises(RuntimeError, match=r"SGD, holds .* that (is|are) not this rank's"):
        torch.optim.SGD(before.values(), lr=0.1).step()


def test_assign_refuses_an_optimizer_and_keeps_attributes() -> None:
    run_ranks(2, assign)


def assign_on_one_rank(rank: int) -> None:
    start(1)
    wrapped = NxDPPModel(make("tied_llama"))
    wrapped.load_state_dict({name: value * 0.5 for name, value in wrapped.state_dict().items()}, assign=True)
    tree = wrapped.local_module
    assert tree.get_parameter("lm_head.weight") is tree.get_parameter("model.embed_tokens.weight")


def test_assign_keeps_ties_of_one_rank() -> None:
    run_ranks(1, assign_on_one_rank)


class Noted(nn.Parameter):
    """A parameter class of a user."""


def freeze_norms(wrapped: NxDPPModel) -> None:
    for name, parameter in wrapped.local_named_parameters():
        parameter.requires_grad_("norm" not in name)
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def move_from_meta(rank: int) -> None:
    start(2)
    torch.manual_seed(3)
    with torch.device("meta"):
        model = make("tied_llama")
    model.lm_head.register_parameter("weight", model.model.embed_tokens.weight)
    norm = model.model.layers[0].input_layernorm
    norm.weight = Noted(norm.weight)
    wrapped = NxDPPModel(model, num_microbatches=2, post_partition_hooks=[freeze_norms])
    optimizer = torch.optim.AdamW(wrapped.local_parameters())
    listed = list(wrapped.local_parameters())
    message = rf"AdamW, holds {len(listed)} of the {len(listed)} .* Make the optimizer after move_model_to_device\(\)"
    with pytest.raises(RuntimeError, match=message):
        wrapped.move_model_to_device()
    assert all(parameter.is_meta for parameter in wrapped.local_parameters())
    del optimizer
    wrapped.move_model_to_device()
    now = dict(wrapped.local_named_parameters())
    wrapped.move_model_to_device()
    for name, parameter in wrapped.local_named_parameters():
        assert parameter is now[name]
        assert not parameter.is_meta
        assert parameter.requires_grad == ("norm" not in name)
        assert parameter.tensor_model_parallel  # type: ignore[attr-defined]
    assert rank == 1 or type(now["model.layers.0.input_layernorm.weight"]) is Noted
    with pytest.raises(RuntimeError, match=r"SGD, holds .* that (is|are) not this rank's"):
        torch.optim.SGD(listed, lr=0.1).step()
    late = torch.optim.AdamW(wrapped.local_parameters())
    wrapped.run_train(**padded_batch(4))
    late.step()


def test_move_from_the_meta_device() -> None:
    run_ranks(2, move_from_meta)


def move_one_wrongly(rank: int) -> None:
    start(2)
    wrapped = NxDPPModel(make("tied_llama"))
    wrapped.move_model_to_device("near" if rank == 1 else None)


def test_failing_rank_ends_the_others() -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match="there is no device 'near' here"):
        run_ranks(2, move_one_wrongly)
    assert time.monotonic() - began < 20
