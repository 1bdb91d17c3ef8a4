"""State of optimizers in one process: of any optimizer of torch, of a user's own, and in other dtypes."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import AdamW, Optimizer

from nxdpp.checkpoint.distributed.optimizer_state import Held
from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint
from nxdpp.gradients.optimizer.fp32_adamw import AdamW_FP32OptimParams
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer

Make = Callable[..., Optimizer]


class Net(nn.Module):
    """Matrices, vectors, a number and a parameter without elements."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32, matrices_alone: bool = False) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first = nn.Linear(8, 6, not matrices_alone, dtype=dtype)
        self.last = nn.Linear(6, 4, not matrices_alone, dtype=dtype)
        self.scale = None if matrices_alone else nn.Parameter(torch.rand((), dtype=dtype))
        self.empty = None if matrices_alone else nn.Parameter(torch.rand(0, 3, dtype=dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``(rows, 4)``."""
        hidden = torch.tanh(self.first(inputs))
        result: torch.Tensor = self.last(hidden if self.scale is None else hidden * self.scale)
        return result


def _train(model: Net, optimizer: Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(step)).to(model.first.weight.dtype)

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(inputs).float().square().mean()
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))  # type: ignore[arg-type, attr-defined]  # torch wants floats
    return losses


def _goes_on(path: Path, saved: Make, loaded: Make, **options: Any) -> tuple[Optimizer, Optimizer]:
    """Compare losses and weights of a training with one that goes on in another model and optimizer."""
    models = [Net(seed, **options) for seed in range(2)]
    optimizers = saved(models[0].parameters()), loaded(models[1].parameters())
    _train(models[0], optimizers[0], range(3))
    # The second has a state of its own that is replaced.
    _train(models[1], optimizers[1], range(5, 7))
    save_checkpoint(path, "saved", models[0], optimizers[0])
    load_checkpoint(path, "saved", models[1], optimizers[1])
    losses = [_train(model, optimizer, range(3, 7)) for model, optimizer in zip(models, optimizers, strict=True)]
    assert losses[0] == losses[1]
    for name, value in models[0].state_dict().items():
        assert torch.equal(models[1].state_dict()[name], value), name
    return optimizers


OPTIMIZERS: dict[str, Make] = {
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "asgd": partial(optim.ASGD, t0=1),
    "foreach": partial(AdamW, foreach=True, amsgrad=True),
    "fused": partial(AdamW, fused=True),
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "rate in a tensor": partial(AdamW, lr=torch.tensor(1e-2), foreach=False),
    "rprop": optim.Rprop,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_torch_goes_on(name: str, tmp_path: Path) -> None:
    _, loaded = _goes_on(tmp_path, OPTIMIZERS[name], OPTIMIZERS[name])
    assert isinstance(loaded.param_groups[0]["lr"], torch.Tensor) == (name == "rate in a tensor")


def test_optimizers_of_matrices_go_on(tmp_path: Path) -> None:
    _goes_on(tmp_path / "muon", optim.Muon, optim.Muon, matrices_alone=True)
    _goes_on(tmp_path / "adafactor", optim.Adafactor, optim.Adafactor)


def test_a_kernel_gets_its_steps_on_the_device_of_the_values(tmp_path: Path) -> None:
    model, other = Net(), Net()
    optimizer = optim.Adam(model.parameters(), fused=True)
    _train(model, optimizer, range(2))
    save_checkpoint(tmp_path, "saved", model, optimizer)
    theirs = optim.Adam(other.parameters())
    for parameter in other.first.parameters():
        theirs.state[parameter]["step"] = torch.zeros((), device="meta")
    load_checkpoint(tmp_path, "saved", other, theirs)
    assert all(state["step"].device.type == "cpu" for state in theirs.state.values())


class Own(Optimizer):
    """SGD with a state of any value."""

    def __init__(self, params: Any, value: Callable[[nn.Parameter], Any], key: str = "own") -> None:
        super().__init__(params, {"lr": 0.1})
        self._value, self._key = value, key

    def step(self, closure: Any = None) -> Any:
        """Step by the sign of the values, and keep the state."""
        loss = closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter][self._key] = self._value(parameter)
                parameter.sub_(0.1 * parameter.sign())
        return loss


class Counting(optim.SGD):
    """SGD with a number that belongs to no parameter."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the number."""
        return {**super().state_dict(), "calls": 1}


def _global(params: Any) -> Optimizer:
    optimizer = optim.SGD(params, lr=0.1)
    optimizer.state["calls"] = 1  # type: ignore[index]  # a key that is no tensor is what is tested
    return optimizer


VALUES: list[Callable[[nn.Parameter], Any]] = [
    lambda parameter: None,
    lambda parameter: float("-inf"),
    lambda parameter: parameter > 0,
    lambda parameter: torch.arange(3),
    lambda parameter: torch.tensor([1 + 2j]),
]


def test_numbers_and_dense_tensors_of_a_users_optimizer_come_back(tmp_path: Path) -> None:
    for number, value in enumerate(VALUES):
        make = partial(Own, value=value)
        saved, loaded = _goes_on(tmp_path / str(number), make, make)
        for one, other in zip(saved.state.values(), loaded.state.values(), strict=True):
            assert repr(one["own"]) == repr(other["own"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(Own, value=lambda parameter: [1.0]), r"the state 'own' of .* is a list.* user_content=optimizer"),
        (partial(Own, value=lambda parameter: {"a": 1}), "the state 'own' of .* is a dict"),
        (partial(Own, value=lambda parameter: "hot"), "the state 'own' of .* is a str"),
        (partial(Own, value=lambda parameter: torch.eye(2).to_sparse()), "is a tensor of layout torch.sparse_coo"),
        (partial(Own, value=torch.clone, key="master"), "has a state 'master' of its own .*another key"),
        (partial(Counting, lr=0.1), "Counting has the state 'calls', which belongs to no parameter"),
        (_global, "SGD has the state 'calls', which belongs to no parameter"),
        (partial(optim.LBFGS, max_iter=3), "of .* is a list.* user_content=optimizer"),
    ],
)
def test_other_state_is_refused(make: Make, message: str, tmp_path: Path) -> None:
    model = Net()
    optimizer = make(model.parameters())
    _train(model, optimizer, range(2))
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path, "saved", model, optimizer)
    assert not any(tmp_path.iterdir())


def test_lists_are_content_of_the_user(tmp_path: Path) -> None:
    models = [Net(seed) for seed in range(2)]
    optimizers = [optim.LBFGS(model.parameters(), max_iter=3) for model in models]
    _train(models[0], optimizers[0], range(2))
    save_checkpoint(tmp_path, "saved", models[0], user_content=optimizers[0].state_dict())
    optimizers[1].load_state_dict(load_checkpoint(tmp_path, "saved", models[1]))
    assert _train(models[0], optimizers[0], range(2, 4)) == _train(models[1], optimizers[1], range(2, 4))


HALF: dict[str, Any] = {"dtype": torch.bfloat16}
MASTERS: dict[str, Make] = {
    "masters": partial(AdamW_FP32OptimParams, lr=0.1),
    "zero1": partial(Zero1Optimizer, optimizer_class=AdamW, grad_clipping=False, lr=0.1),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("saved", MASTERS)
@pytest.mark.parametrize("loaded", MASTERS)
def test_master_copies_go_from_one_optimizer_to_another(saved: str, loaded: str, tmp_path: Path) -> None:
    _goes_on(tmp_path, MASTERS[saved], MASTERS[loaded], **HALF)


@pytest.mark.usefixtures("one_rank")
def test_full_precision_goes_from_one_optimizer_to_another(tmp_path: Path) -> None:
    plain = partial(AdamW, lr=0.1)
    _goes_on(tmp_path / "sharded", plain, MASTERS["zero1"])
    _goes_on(tmp_path / "plain", MASTERS["zero1"], plain)
    _goes_on(tmp_path / "masters", MASTERS["zero1"], MASTERS["masters"])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", MASTERS)
def test_state_has_the_dtype_of_the_optimizer_that_loads_it(name: str, tmp_path: Path) -> None:
    model, other = Net(**HALF), Net(1, **HALF)
    optimizer = AdamW(model.parameters(), lr=0.1)
    _train(model, optimizer, range(3))
    save_checkpoint(tmp_path, "half", model, optimizer)
    wider = MASTERS[name](other.parameters())
    # Master copies of other values have low bits that would stay.
    _train(other, wider, range(3))
    load_checkpoint(tmp_path, "half", other, wider)
    assert _dtypes(wider) == {torch.float32}
    fresh = Net(2, **HALF)
    with torch.no_grad():
        fresh.load_state_dict(model.state_dict())
    expected = MASTERS[name](fresh.parameters())
    load_checkpoint(tmp_path, "half", fresh, expected)
    assert _train(other, wider, range(3, 6)) == _train(fresh, expected, range(3, 6))

    save_checkpoint(tmp_path, "wide", other, wider)
    with pytest.warns(UserWarning, match="rounded parameters and rounded state"):
        load_checkpoint(tmp_path, "wide", model, optimizer)
    assert _dtypes(optimizer) == {torch.bfloat16}
    _train(model, optimizer, range(3))


def _dtypes(optimizer: Optimizer) -> set[torch.dtype]:
    return {value.dtype for state in optimizer.state.values() for key, value in state.items() if key != "step"}


def test_master_copies_that_were_not_saved_are_the_parameters() -> None:
    """Of the elements of a shard, without low bits that round to the same parameter."""
    parameter = nn.Parameter(torch.arange(1.0, 7.0).view(2, 3).bfloat16())
    masters = parameter.detach().float().view(-1)[2:5] + 2.0**-10
    assert torch.equal(masters.bfloat16(), parameter.detach().view(-1)[2:5])
    held = Held("weight", parameter, 2, masters, {}, torch.float32)
    held.give(held.new_state({}, {}), {})
    assert masters.tolist() == [3.0, 4.0, 5.0]


@pytest.mark.usefixtures("one_rank")
def test_state_of_parameters_that_a_sharding_optimizer_leaves_out_is_refused(tmp_path: Path) -> None:
    model = Net()
    optimizer = MASTERS["zero1"](model.parameters())
    _train(model, optimizer, range(2))
    save_checkpoint(tmp_path, "saved", model, optimizer)
    other = Net(1)
    other.first.weight.requires_grad_(False)
    theirs = MASTERS["zero1"](other.parameters())
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError, match=r"state of first.weight, which do not require a gradient: call requires_grad"):
        load_checkpoint(tmp_path, "saved", other, theirs)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    load_checkpoint(tmp_path, "saved", other, theirs, strict=False)
    # The remedy.
    other.first.weight.requires_grad_(True)
    load_checkpoint(tmp_path, "saved", other, theirs)
    assert _train(model, optimizer, range(2, 5)) == _train(other, theirs, range(2, 5))


def test_parameters_frozen_or_added_since(tmp_path: Path) -> None:
    model = Net()
    model.last.requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=0.1)
    _train(model, optimizer, range(2))
    save_checkpoint(tmp_path, "frozen", model, optimizer)
    thawed = Net(1)
    theirs = AdamW(thawed.parameters(), lr=0.1)
    _train(thawed, theirs, range(2))
    load_checkpoint(tmp_path, "frozen", thawed, theirs)
    assert thawed.last.weight not in theirs.state
    model.last.requires_grad_(True)
    assert _train(model, optimizer, range(2, 5)) == _train(thawed, theirs, range(2, 5))
    # A group that was added later has to be added before the load.
    grown = AdamW([*model.first.parameters()], lr=0.1)
    save_checkpoint(tmp_path, "before", model, grown)
    grown.add_param_group({"params": [*model.last.parameters()], "lr": 0.2})
    save_checkpoint(tmp_path, "grown", model, grown)
    theirs = AdamW([*thawed.first.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"has last.bias, last.weight, and this optimizer does not"):
        load_checkpoint(tmp_path, "grown", thawed, theirs)
    theirs.add_param_group({"params": [*thawed.last.parameters()]})
    load_checkpoint(tmp_path, "grown", thawed, theirs)
    assert theirs.param_groups[1]["lr"] == 0.2


def test_another_precision_of_the_model_is_refused_with_a_remedy(tmp_path: Path) -> None:
    half = Net(**HALF)
    save_checkpoint(tmp_path, "half", half)
    model = Net(1)
    with pytest.raises(ValueError, match=r"build the model that was saved\. A training with master copies and one w"):
        load_checkpoint(tmp_path, "half", model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(tmp_path, "half", model.bfloat16())
    assert torch.equal(model.float().first.weight, half.first.weight.float())


@pytest.mark.usefixtures("one_rank")
def test_state_that_a_constructor_makes_of_frozen_parameters_stays(tmp_path: Path) -> None:
    def frozen(seed: int, sharded: bool) -> tuple[Net, Optimizer]:
        model = Net(seed)
        model.last.requires_grad_(False)
        if not sharded:
            return model, optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
        return model, Zero1Optimizer(
            model.parameters(), optim.Adagrad, grad_clipping=False, initial_accumulator_value=0.5
        )

    for number, sharded in enumerate((True, False)):
        model, optimizer = frozen(0, sharded)
        _train(model, optimizer, range(2))
        save_checkpoint(tmp_path, str(number), model, optimizer)
        other, theirs = frozen(1, not sharded)
        load_checkpoint(tmp_path, str(number), other, theirs)
        for each in (model, other):
            each.last.requires_grad_(True)
        assert _train(model, optimizer, range(2, 5)) == _train(other, theirs, range(2, 5))


def test_state_of_rows_is_refused_for_a_part() -> None:
    whole = nn.Parameter(torch.zeros(4, 6))
    part = nn.Parameter(torch.zeros(12))
    saved = {"row_var": {"tensor": "float32", "shape": [4, 1]}}
    own = Held("weight", whole, 0, whole, {}, torch.float32)
    assert own.new_state(saved, {})["row_var"].shape == (4, 1)
    divided = Held("weight", whole, 0, part, {}, torch.float32)
    with pytest.raises(ValueError, match=r"'row_var' of weight has shape \[4, 1\], and this rank has a part"):
        divided.new_state(saved, {})
