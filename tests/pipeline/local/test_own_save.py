"""State dicts and pickles of a module of which one rank holds a part: refused by name, and what is advised."""

import copy
import io

import pytest
import torch

from nxdpp import NxDPPModel, gather_state_dict, parallel_state
from tests.pipeline.after_wrapping.scripts import Layer, Plain
from tests.support.run_ranks import run_ranks


def save(rank: int) -> list[str]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    module = Plain()
    whole = copy.deepcopy(module)
    model = NxDPPModel(module, transformer_layer_cls=Layer)
    messages = []
    # In each module, and in its copy, are tensors of the other rank.
    for part in (module, module.layers, (module.head, module.embed)[rank], copy.deepcopy(module)):
        with pytest.raises(RuntimeError, match="another rank holds") as caught:
            torch.save(part.state_dict(), io.BytesIO())
        messages.append(str(caught.value))
    # Neither are they written with the modules, or as values of a dict.
    parameters = dict(module.named_parameters())
    for value in (
        module,
        {"model": module.layers},
        (module.head, module.embed)[rank],
        copy.deepcopy(module),
        parameters,
    ):
        with pytest.raises(RuntimeError, match=r"another rank holds .* a pickle \(torch.save\)") as caught:
            torch.save(value, io.BytesIO())
        messages.append(str(caught.value))
    torch.save(model.local_module, io.BytesIO())
    here = (module.embed, module.head)[rank].state_dict()
    assert not here["weight"].is_meta
    # What the message advises, and loads.
    assert not any(tensor.is_meta for tensor in model.local_state_dict().values())
    expected = {name: value + 1 for name, value in whole.state_dict().items()}
    model.load_state_dict(expected)
    gathered = gather_state_dict(model)
    if gathered is not None:
        assert gathered.keys() == expected.keys()
        assert all(torch.equal(value, expected[name].cpu()) for name, value in gathered.items())
    return messages


def test_a_state_dict_without_values_of_other_ranks_is_refused() -> None:
    first, last = run_ranks(2, save)

    assert "another rank holds layers.2.linear.weight, and a state dict of the module" in first[0]
    assert "another rank holds embed.weight," in last[0]
    assert "model.local_state_dict() has this rank's part" in first[0]
    names = ("2.linear", "", "layers.2.linear", "layers.2.linear", "layers.2.linear", "head")
    for message, name in zip(first[1:], names, strict=False):
        assert message.split(",")[0] == f"another rank holds {name}{name and '.'}weight"
