"""Moves: local tensors change device, copies of a tied weight are equal, unmoved parameters stay the same."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.local import tied_weights
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


def make_equal(rank: int) -> None:
    """Copies get the values of the first owner, in bfloat16 and with other strides on one rank too."""
    start(3)
    names = ["near.weight", "far.weight", "shared.weight", "near_twin.weight", "far_twin.weight"]
    for dtype, transposed in ((torch.float32, False), (torch.bfloat16, True)):
        wrapped = NxDPPModel(several_ties().to(dtype), transformer_layer_cls=Layer)
        with torch.no_grad():
            for name, parameter in wrapped.local_named_parameters():
                if transposed and name in names and rank == 1:
                    parameter.data = parameter.data.t().contiguous().t()
                # One copy keeps its values.
                if name != "near_twin.weight":
                    parameter.add_(rank)
        before = dict(wrapped.local_named_parameters())
        kept = {name: parameter.detach().clone() for name, parameter in before.items()}
        with patch.object(tied_weights, "_PIECE_BYTES", 1000 if transposed else 20):
            wrapped.move_model_to_device()
        first = several_ties().to(dtype).state_dict()
        for name, parameter in wrapped.local_named_parameters():
            assert parameter is before[name]
            assert torch.equal(parameter, first[name] if name in names else kept[name])
            assert parameter.requires_grad


def test_copies_get_the_values_of_the_first_owner() -> None:
    run_ranks(3, make_equal)


def cast_one_copy(rank: int) -> None:
    wrapped = NxDPPModel(make("tied_llama"))
    for device, message in [("cuda:77", "no device 'cuda:77'"), ("near", "no device 'near'"), ("meta", "no memory")]:
        with pytest.raises(ValueError, match=message):
            wrapped.move_model_to_device(device)
    if rank == 1:
        wrapped.local_module.get_submodule("lm_head").to(torch.bfloat16)
    message = (
        r"torch.float32 of \[61, 32\] on pipeline rank 0 \(model.embed_tokens.weight\) and torch.bfloat16 of "
        r"\[61, 32\] on pipeline rank 1 \(lm_head.weight\)"
    )
    with pytest.raises(RuntimeError, match=message):
        wrapped.move_model_to_device()


def assign(rank: int) -> None:
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


class Noted(nn.Parameter):
    """A parameter class of a user."""


def freeze_norms(wrapped: NxDPPModel) -> None:
    for name, parameter in wrapped.local_named_parameters():
        parameter.requires_grad_("norm" not in name)
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def move_from_meta(rank: int) -> None:
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


def on_two_ranks(rank: int) -> None:
    start(2)
    cast_one_copy(rank)
    assign(rank)
    move_from_meta(rank)


def test_moves_and_assigned_values_keep_parameters_and_name_optimizers() -> None:
    run_ranks(2, on_two_ranks)


@pytest.mark.usefixtures("one_rank")
def test_assign_keeps_ties_of_one_rank() -> None:
    wrapped = NxDPPModel(make("tied_llama"))
    wrapped.load_state_dict({name: value * 0.5 for name, value in wrapped.state_dict().items()}, assign=True)
    tree = wrapped.local_module
    assert tree.get_parameter("lm_head.weight") is tree.get_parameter("model.embed_tokens.weight")
