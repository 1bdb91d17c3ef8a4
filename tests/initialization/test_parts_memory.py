"""Initial weights of parts: values of the whole, in the memory of the parts and of one module."""

import gc
import warnings

import torch
from torch import nn

from nxdpp import parallel_state, tensor_parallelize
from nxdpp.initialization.materialise import MetaTensor, initial_weights
from nxdpp.initialization.parts import own_part
from tests.support.run_ranks import run_ranks

LAYERS, WIDTH = 8, 256
WHOLE = 4 * (WIDTH**2 + WIDTH)
_live: list[int] = []


def _live_tensors() -> list[torch.Tensor]:
    # isinstance would ask the values of traces, which end with their trace. Fake tensors of a compilation have no size.
    plain = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return [each for each in plain if not each.is_meta and type(each).__name__ != "FakeTensor"]


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        _live.append(sum(storage.nbytes() for storage in {each.untyped_storage() for each in _live_tensors()}))


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = _Linear(width, width), _Linear(width, width)


def _model(width: int) -> nn.Module:
    model = nn.Module()
    with torch.device("meta"):
        model.layers = nn.ModuleList(_Layer(width) for _ in range(LAYERS))
    return model


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    metas = [MetaTensor(name, parameter) for name, parameter in model.named_parameters()]
    values, has_drawn = initial_weights(model, metas, 5, None)
    assert has_drawn
    return {meta.name: value for meta, value in zip(metas, values, strict=True)}


def test_one_module_is_whole_at_a_time() -> None:
    # In a process with few objects: each module counts all tensors that live.
    run_ranks(1, _made_in_parts)


def _made_in_parts(rank: int) -> None:
    warnings.filterwarnings("ignore", ".*this plan was not compared")
    parallel_state.initialize_debug(tensor_model_parallel_size=2)
    try:
        model = _model(WIDTH)
        tensor_parallelize(model, {"layers.*.up": "colwise", "layers.*.down": "rowwise"})
        gc.collect()
        _live.clear()
        before = sum(each.nbytes for each in _live_tensors())
        values = _values(model)
        parts = sum(value.nbytes for value in values.values())
        assert 2 * LAYERS * WHOLE / 2 <= parts < 2 * LAYERS * WHOLE * 0.51
        # In the last module all parts but its own are there already, and it is whole.
        assert parts - WHOLE < max(_live) - before < parts - WHOLE / 2 + WHOLE + 10_000
        for name, whole in _values(_model(WIDTH)).items():
            assert torch.equal(own_part(whole, model.get_parameter(name)), values[name]), name
    finally:
        parallel_state.destroy_model_parallel()
