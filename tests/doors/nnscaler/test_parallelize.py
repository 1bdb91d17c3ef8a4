"""``parallelize``: objects and classes, values, dtypes, and modules that are called."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from nxdpp.nnscaler import ComputeConfig, ParallelModule, ReuseType
from tests.doors.nnscaler.own_folders import parallelize
from tests.doors.nnscaler.trained_modules import WIDTH, Held, Mlp, Net, NetOfHeld, sample
from tests.support.run_ranks import run_ranks

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
FOR_TP = ComputeConfig(2, 4)
FOR_DP = ComputeConfig(1, 4)
FOR_PP = ComputeConfig(2, 4, use_end2end=True, pas_config={"pipeline_nmicros": 2})


def made(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def loaded(*args: Any, **kwargs: Any) -> ParallelModule:
    module = parallelize(*args, **kwargs)
    assert isinstance(module, ParallelModule)
    return module


def loaded_class(*args: Any, **kwargs: Any) -> type[ParallelModule]:
    kind = parallelize(*args, **kwargs)
    assert isinstance(kind, type)
    assert issubclass(kind, ParallelModule)
    return kind


def test_objects_and_classes_on_ranks() -> None:
    run_ranks(4, _all_cases)


def _all_cases(rank: int) -> None:
    for group in _CASES:
        for case in group:
            case(rank)
        parallel_state.destroy_model_parallel()


def _an_object_gives_an_object(rank: int) -> None:
    module, whole = made(), made()
    before = copy.deepcopy(module.state_dict())
    model = loaded(module, {"x": X}, "tp", FOR_TP)

    assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert model.get_parameter("first.weight").shape == (WIDTH, WIDTH)
    assert parallel_state.get_pipeline_model_parallel_group(True) == [[0], [1], [2], [3]]
    assert parallel_state.get_tensor_model_parallel_group(True) == [[0, 1], [2, 3]]
    torch.testing.assert_close(model(X), whole(X))
    torch.testing.assert_close(model(x=X, power=2), whole(X, 2))
    model(X).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in module.parameters())


def _a_class_gives_a_class(rank: int) -> None:
    # Other ranks have other seeds: the state of rank 0 counts.
    torch.manual_seed(rank)
    kind = loaded_class(Net, {"x": X}, "tp", FOR_TP)
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(rank).get_state())
    for model in (kind(), kind()):
        torch.testing.assert_close(model(X), made()(X))
    assert kind.__name__ == "ParallelNet"


def _values_of_rank_0_count(rank: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = loaded(made(rank), {"x": X}, "dp", FOR_DP)
    assert any("take those of rank 0" in str(each.message) for each in caught)
    assert torch.equal(model(X), made()(X))


def _a_dtype(rank: int) -> None:
    module = made()
    model = loaded(module, {"x": X}, "dp", FOR_DP, module_dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model(X.bfloat16()), made().bfloat16()(X.bfloat16()))
    assert module.first.weight.dtype == torch.float32
    torch.manual_seed(0)
    other = loaded_class(Net, {"x": X}, "dp", FOR_DP, module_dtype=torch.bfloat16)()
    assert torch.equal(other(X.bfloat16()), model(X.bfloat16()))


def _parameters_without_values(rank: int) -> None:
    torch.manual_seed(0)
    kind = loaded_class(Net, {"x": X}, "dp", FOR_DP)
    given = loaded(made(), {"x": X}, "dp", FOR_DP, init_module_params=False)
    for model in (kind(init_params=False), kind(False), given):
        assert model.get_parameter("first.weight").isnan().all()
        with pytest.raises(
            RuntimeError, match=r"initialized. 6 parameters or buffers have no values \(first.bias is the first\)"
        ):
            model(X)
        state = made().state_dict()
        model.load_state_dict({name: state[name] for name in list(state)[1:]}, strict=False)
        with pytest.raises(RuntimeError, match="2 parameters or buffers have no values"):
            model(X)
        model.load_state_dict(state)
        # No state dict has it.
        with pytest.raises(RuntimeError, match=r"buffers haven't been initialized. 1 .* no values .shift is the first"):
            model(X)
        assert not model.non_presistent_buffers_inited
        with pytest.raises(RuntimeError, match=r"1 non-persistent buffer has no values yet .shift is the first.:"):
            model.mark_non_persistent_buffers_inited()
        model.get_buffer("shift").fill_(1)
        model.mark_non_persistent_buffers_inited()
        assert torch.equal(model(X), made()(X))


def _state_dicts_have_the_names_of_the_module(rank: int) -> None:
    outer = nn.Sequential(nn.Linear(WIDTH, WIDTH), loaded(made(), {"x": X}, "dp", FOR_DP))
    names = [name for name in outer.state_dict() if "nxdpp_extra_state" not in name]
    assert names == ["0.weight", "0.bias", *(f"1.{name}" for name in made().state_dict())]
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH), loaded(made(1), {"x": X}, "dp", FOR_DP))
    other.load_state_dict(outer.state_dict())
    assert torch.equal(other(X), outer(X))
    assert {parameter.dtype for parameter in outer.double().parameters()} == {torch.float64}
    assert outer(X.double()).dtype == torch.float64


def _other_inputs_inside_a_unit_are_refused(rank: int) -> None:
    model = loaded(made(), {"x": X}, "tp", FOR_TP)
    with pytest.raises(RuntimeError, match=r"in one unit and got other inputs.*rank // plan_ngpus"):
        model(X + rank)
    model(X + rank // 2)
    held = loaded(NetOfHeld(), {"held": Held(X)}, "tp", FOR_TP)
    with pytest.raises(RuntimeError, match="in one unit and got other inputs"):
        held(Held(X + rank))


_CASES: list[list[Callable[[int], None]]] = [
    [_an_object_gives_an_object, _a_class_gives_a_class, _other_inputs_inside_a_unit_are_refused],
    [
        _values_of_rank_0_count,
        _a_dtype,
        _parameters_without_values,
        _state_dicts_have_the_names_of_the_module,
    ],
]


def test_a_plan_needs_no_torchrun(tmp_path: Any) -> None:
    module = made()
    for each in (module, Net):
        assert parallelize(each, {"x": X}, "tp", FOR_TP, load_module=False, gen_savedir=tmp_path) is None
    assert parallelize(Mlp(), {"data": sample(0)}, "pp", FOR_PP, load_module=False, gen_savedir=tmp_path) is None
    assert not parallel_state.model_parallel_is_initialized()
    assert ReuseType("match") is ReuseType.MATCH
