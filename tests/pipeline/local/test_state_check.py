"""State dicts that do not fit: an error before anything is changed."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from nxdpp import NxDPPModel
from nxdpp.pipeline.local.loading import check_state
from tests.support.models import make

pytestmark = pytest.mark.usefixtures("one_rank")

NAME = "model.layers.1.mlp.up_proj.weight"
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another shape": (lambda state: state.update({NAME: torch.zeros(3, 3)}), f"size mismatch for {NAME}: copying"),
    "missing": (lambda state: state.pop(NAME), f"Missing key.s. in state_dict: '{NAME}'"),
    "unexpected": (lambda state: state.update({"a": torch.zeros(1)}), r"Unexpected key.s. in state_dict: 'a'\."),
    "integers": (lambda state: state.update({NAME: state[NAME].int()}), f"{NAME} is of torch.int32 in the state dict"),
    "8 bits": (
        lambda state: state.update({NAME: state[NAME].to(torch.float8_e4m3fn)}),
        f"{NAME} is of torch.float8_e4m3fn in the state dict, and of torch.float32 in the model",
    ),
    "no tensor": (lambda state: state.update({NAME: 3.0}), f"{NAME} must be a tensor, not a float"),
}


def test_nothing_is_changed() -> None:
    wrapped = NxDPPModel(make("llama", layers=2))
    parameters = dict(wrapped.local_named_parameters())
    before = {name: tensor.clone() for name, tensor in wrapped.local_state_dict().items()}
    for (change, (damage, message)), assign in itertools.product(CHANGES.items(), (False, True)):
        state: dict[str, Any] = {name: tensor + 1 for name, tensor in before.items()}
        damage(state)
        with pytest.raises(RuntimeError, match=rf"Nothing was loaded:\n\t{message}"):
            wrapped.load_state_dict(state, assign=assign)
        after = wrapped.local_state_dict()
        assert all(torch.equal(before[name], tensor) for name, tensor in after.items()), change
        assert all(parameters[name] is parameter for name, parameter in wrapped.local_named_parameters()), change


def test_what_torch_loads_is_not_refused() -> None:
    for module in (
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        nn.LazyLinear(2),
        checkpoint_wrapper(nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
    ):
        state = module.state_dict()
        check_state(module, state, strict=True)
        module.load_state_dict(state)
