"""A wrapper of a layer that hands keyword arguments on by position, as the recipe of NxD's pipeline guide."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.local.positional_wrappers import follow_wrapped
from tests.support.by_position import ByPosition
from tests.support.models import make, padded_batch
from tests.support.run_ranks import run_ranks


def apply_checkpoint(dist_model: Any) -> None:
    for name, module in dist_model.local_module.named_children():
        if type(module) is dist_model.transformer_layer_cls:
            dist_model.local_module.add_module(name, ByPosition(module))


def gradients(with_recipe: bool) -> tuple[Any, list[torch.Tensor]]:
    # Arguments of NxD's scripts.
    given: dict[str, Any] = {"auto_partition": True, "pipeline_cuts": [], "use_optimizer_wrapper": True}
    model = NxDPPModel(make("llama", layers=2), num_microbatches=2, broadcast_and_average_loss=True, **given)
    model.move_model_to_device()
    if with_recipe:
        apply_checkpoint(model)
    loss = model.run_train(**padded_batch(4))
    return loss, [parameter.grad for parameter in model.local_parameters() if parameter.grad is not None]


def over_two_ranks(rank: int) -> tuple[bool, bool, int]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    ByPosition.runs = 0
    (loss, expected), (same_loss, recomputed) = gradients(False), gradients(True)
    same = len(expected) == len(recomputed) and all(map(torch.equal, expected, recomputed))
    return torch.equal(loss, same_loss), same, ByPosition.runs


def test_the_recipe_of_the_guide_runs_on_layers_of_today() -> None:
    for found in run_ranks(2, over_two_ranks):
        # One layer and two microbatches, each in the forward and in the backward.
        assert found == (True, True, 4)


class Layer(nn.Module):
    def forward(self, x: torch.Tensor, shift: Any = 0, *, scale: Any = 1, **others: Any) -> Any:
        return x * scale + shift, sorted(others)


class Wrapper(nn.Module):
    """Hands arguments on by position, in the order of the call."""

    def __init__(self, mod: nn.Module) -> None:
        super().__init__()
        self.mod = mod

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return self.mod(x, *kwargs.values())


def wrapped() -> Wrapper:
    root = nn.Module()
    layer = Layer()
    root.layer = Wrapper(layer)
    follow_wrapped(root, {"layer": layer})
    return root.layer


def test_arguments_and_a_recomputation_have_the_names_of_the_call() -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    result, others = wrapped()(one, scale=two, position=None)
    assert result.item() == 2
    assert others == ["position"]
    wrapper = wrapped()
    wrapper(one, scale=two)
    assert wrapper.mod(torch.tensor(3.0), torch.tensor(5.0))[0].item() == 15
    with pytest.raises(RuntimeError, match=r"Wrapper hands 2 arguments on by position, .*\['scale'\].*\['shift'\]"):
        wrapper(one, shift=two)
