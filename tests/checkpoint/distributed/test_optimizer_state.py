"""State of optimizers and schedulers in one process: they go on exactly, and what does not fit is refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import AdamW, Optimizer
from torch.optim import lr_scheduler as rates

from nxdpp.checkpoint.distributed.optimizer_state import Held
from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint
from nxdpp.gradients.optimizer.fp32_adamw import AdamW_FP32OptimParams
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer

Make = Callable[..., Optimizer]


class Net(nn.Module):
    """Matrices, vectors, a number and a parameter without elements."""

    def __init__(
        self, seed: int = 0, dtype: torch.dtype = torch.float32, matrices_alone: bool = False, width: int = 8
    ) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first = nn.Linear(width, 6, not matrices_alone, dtype=dtype)
        self.last = nn.Linear(6, 4, not matrices_alone, dtype=dtype)
        self.scale = None if matrices_alone else nn.Parameter(torch.rand((), dtype=dtype))
        self.empty = None if matrices_alone else nn.Parameter(torch.rand(0, 3, dtype=dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``(rows, 4)``."""
        hidden = torch.tanh(self.first(inputs))
        result: torch.Tensor = self.last(hidden if self.scale is None else hidden * self.scale)
        return result


def _train(model: Net, optimizer: Optimizer, steps: range, scheduler: Any = None) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(step)).to(model.first.weight.dtype)

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(inputs).float().square().mean()
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))  # type: ignore[arg-type, attr-defined]  # torch wants floats
        if scheduler is not None:
            scheduler.step(*([losses[-1]] if isinstance(scheduler, rates.ReduceLROnPlateau) else []))
    return losses


def _goes_on(
    path: Path, saved: Make, loaded: Make, make_rates: Any = None, before: int = 3, **options: Any
) -> tuple[Optimizer, Optimizer]:
    """Compare losses and weights of a training with one that goes on in another model and optimizer."""
    models = [Net(seed, **options) for seed in range(2)]
    optimizers = saved(models[0].parameters()), loaded(models[1].parameters())
    schedulers = [make_rates(each) if make_rates else None for each in optimizers]
    _train(models[0], optimizers[0], range(before), schedulers[0])
    if before:
        # The second has a state of its own that is replaced.
        _train(models[1], optimizers[1], range(5, 7))
    save_checkpoint(path, "saved", models[0], optimizers[0], schedulers[0])
    load_checkpoint(path, "saved", models[1], optimizers[1], schedulers[1])
    losses = [_train(*each[:2], range(3, 7), each[2]) for each in zip(models, optimizers, schedulers, strict=True)]
    assert losses[0] == losses[1]
    for name, value in models[0].state_dict().items():
        assert torch.equal(models[1].state_dict()[name], value), name
    assert [group["lr"] for group in optimizers[0].param_groups] == [
        group["lr"] for group in optimizers[1].param_groups
    ]
    return optimizers


ADAMW = partial(AdamW, lr=1e-2)
OPTIMIZERS: list[Make] = [
    optim.Adadelta, optim.Adagrad, optim.Adamax, optim.NAdam, optim.RAdam, optim.Rprop, optim.Adafactor,
    partial(optim.SGD, lr=0.01, momentum=0.9), partial(optim.SGD, lr=0.01), partial(optim.ASGD, t0=1),
    partial(optim.RMSprop, momentum=0.9, centered=True), partial(AdamW, foreach=True, amsgrad=True),
    partial(AdamW, fused=True), partial(AdamW, lr=torch.tensor(1e-2), foreach=False),
]  # fmt: skip
SCHEDULERS: list[Callable[[Optimizer], Any]] = [
    lambda optimizer: rates.OneCycleLR(optimizer, 1e-2, total_steps=20),
    lambda optimizer: rates.SequentialLR(
        optimizer, [rates.LinearLR(optimizer, total_iters=2), rates.CosineAnnealingLR(optimizer, 10)], [2]
    ),
    lambda optimizer: rates.ReduceLROnPlateau(optimizer, patience=0),
]


def test_optimizers_and_schedulers_of_torch_go_on(tmp_path: Path) -> None:
    for number, make in enumerate(OPTIMIZERS):
        _goes_on(tmp_path / str(number), make, make)
    for number, make_rates in enumerate(SCHEDULERS):
        _goes_on(tmp_path / f"rates {number}", ADAMW, ADAMW, make_rates)
    _goes_on(tmp_path / "muon", optim.Muon, optim.Muon, matrices_alone=True)
    _goes_on(tmp_path / "unused", ADAMW, ADAMW, before=0)


def test_a_scheduler_of_another_class_is_refused_and_one_left_out_is_named(tmp_path: Path) -> None:
    model = Net()
    optimizer = ADAMW(model.parameters())
    save_checkpoint(tmp_path, "saved", model, optimizer, rates.CosineAnnealingLR(optimizer, 10))
    other = rates.StepLR(optimizer, 5)
    with pytest.raises(ValueError, match="has T_max, eta_min, and this StepLR has gamma, step_size: make the schedu"):
        load_checkpoint(tmp_path, "saved", model, optimizer, other)
    assert not hasattr(other, "T_max")
    with pytest.warns(UserWarning, match="has the state of a scheduler, which is not loaded: give scheduler="):
        load_checkpoint(tmp_path, "saved", model, optimizer)


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


def test_numbers_and_dense_tensors_of_a_users_optimizer_come_back(tmp_path: Path) -> None:
    values: list[Callable[[nn.Parameter], Any]] = [
        lambda parameter: float("-inf"),
        lambda parameter: parameter > 0,
        lambda parameter: torch.tensor([1 + 2j]),
    ]
    for number, value in enumerate(values):
        make = partial(Own, value=value)
        saved, loaded = _goes_on(tmp_path / str(number), make, make)
        for one, other in zip(saved.state.values(), loaded.state.values(), strict=True):
            assert repr(one["own"]) == repr(other["own"])


def test_other_state_is_refused(tmp_path: Path) -> None:
    """Also: take what a list holds for content of the user."""
    others: list[tuple[Make, str]] = [
        (partial(Own, value=lambda parameter: {"a": 1}), "the state 'own' of .* is a dict"),
        (partial(Own, value=lambda parameter: torch.eye(2).to_sparse()), "is a tensor of layout torch.sparse_coo"),
        (partial(Own, value=torch.clone, key="master"), "has a state 'master' of its own .*another key"),
        (partial(Counting, lr=0.1), "Counting has the state 'calls', which belongs to no parameter"),
        (partial(optim.LBFGS, max_iter=3), "of .* is a list.* user_content=optimizer"),
    ]
    for make, message in others:
        model = Net()
        optimizer = make(model.parameters())
        _train(model, optimizer, range(2))
        with pytest.raises(ValueError, match=message):
            save_checkpoint(tmp_path, "saved", model, optimizer)
        assert not any(tmp_path.iterdir())
    save_checkpoint(tmp_path, "saved", model, user_content=optimizer.state_dict())
    other = Net(1)
    theirs = optim.LBFGS(other.parameters(), max_iter=3)
    theirs.load_state_dict(load_checkpoint(tmp_path, "saved", other))
    assert _train(model, optimizer, range(2, 4)) == _train(other, theirs, range(2, 4))


HALF: dict[str, Any] = {"dtype": torch.bfloat16}
MASTERS: dict[str, Make] = {
    "masters": partial(AdamW_FP32OptimParams, lr=0.1),
    "zero1": partial(Zero1Optimizer, optimizer_class=AdamW, grad_clipping=False, lr=0.1),
}


@pytest.mark.usefixtures("one_rank")
def test_state_goes_from_one_optimizer_to_another(tmp_path: Path) -> None:
    masters, zero1 = MASTERS.values()
    plain: Make = partial(AdamW, lr=0.1)
    half = [(masters, masters), (masters, zero1), (zero1, masters)]
    for number, (saved, loaded) in enumerate(half):
        _goes_on(tmp_path / f"half {number}", saved, loaded, **HALF)
    for number, (saved, loaded) in enumerate([(plain, zero1), (zero1, plain)]):
        _goes_on(tmp_path / str(number), saved, loaded)


@pytest.mark.usefixtures("one_rank")
def test_state_has_the_dtype_of_the_optimizer_that_loads_it(tmp_path: Path) -> None:
    name = "zero1"
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


def _grouped(model: Net) -> Optimizer:
    rest = [model.scale, model.empty, *model.last.parameters()]
    groups: list[dict[str, Any]] = [{"params": list(model.first.parameters())}, {"params": rest, "weight_decay": 0.0}]
    return AdamW(groups, lr=1e-2)


def _single(model: Net) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2)


def _partial(model: Net) -> Optimizer:
    return AdamW(model.last.parameters(), lr=1e-2)


def _other_class(model: Net) -> Optimizer:
    return optim.SGD(model.parameters(), lr=1e-2)


REFUSED: list[tuple[Make, Make, dict[str, Any], str]] = [
    (_single, _grouped, {}, "in groups with weight_decay=0.01 and 0.0, and were in one group of the checkpoint"),
    (_single, _partial, {}, "has (empty, )?first.bias, first.weight, scale, and this optimizer does not"),
    (_single, _other_class, {}, "has the state of AdamW, and the optimizer is SGD"),
    (_single, _single, {"width": 7}, r"first.weight is of shape \[6, 8\]"),
    (
        _single,
        _single,
        {"dtype": torch.bfloat16},
        r"torch.float32 in (.|\n)*build the model that was saved",
    ),
]


def test_others_are_refused_before_anything_changes(tmp_path: Path) -> None:
    for saved, loaded, options, message in REFUSED:
        model = Net()
        optimizer = saved(model)
        _train(model, optimizer, range(2))
        save_checkpoint(tmp_path, "saved", model, optimizer)
        other = Net(1, **options)
        before = {name: value.clone() for name, value in other.state_dict().items()}
        theirs = loaded(other)
        state = theirs.state_dict()
        with pytest.raises(ValueError, match=message):
            load_checkpoint(tmp_path, "saved", other, theirs)
        assert theirs.state_dict() == state
        assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


def test_state_of_rows_is_refused_for_a_part() -> None:
    whole = nn.Parameter(torch.zeros(4, 6))
    part = nn.Parameter(torch.zeros(12))
    saved = {"row_var": {"tensor": "float32", "shape": [4, 1]}}
    own = Held("weight", whole, 0, whole, {}, torch.float32)
    assert own.new_state(saved, {})["row_var"].shape == (4, 1)
    divided = Held("weight", whole, 0, part, {}, torch.float32)
    with pytest.raises(ValueError, match=r"'row_var' of weight has shape \[4, 1\], and this rank has a part"):
        divided.new_state(saved, {})
