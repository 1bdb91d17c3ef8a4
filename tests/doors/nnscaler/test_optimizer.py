"""Optimizers of ``build_optimizer`` beside those of one process: sums, hooks, closures, clipping and ZeRO."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from nxdpp.doors.nnscaler.parallel_optimizer import Reducer
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from nxdpp.nnscaler import (
    ComputeConfig,
    ParallelModule,
    ParallelOptimizer,
    build_optimizer,
    deduped_state_dict,
    load_deduped_state_dict,
    merge_state_dicts,
)
from tests.doors.nnscaler.own_folders import parallelize
from tests.doors.nnscaler.trained_modules import WIDTH, Mlp, Net, sample
from tests.support.run_ranks import run_ranks

RANKS, STEPS, MICROBATCHES = 4, 3, 2


def whole() -> Mlp:
    torch.manual_seed(0)
    return Mlp()


def end_to_end(plan: int = 1, policy: str = "dp", **settings: Any) -> ParallelModule:
    pas_config = {"pipeline_nmicros": MICROBATCHES} if policy == "pp" else {}
    config = ComputeConfig(plan, RANKS, use_end2end=True, pas_config=pas_config, **settings)
    model = parallelize(whole(), {"data": sample(0)}, policy, config)
    assert isinstance(model, ParallelModule)
    return model


def samples_of(unit: int, step: int) -> list[dict[str, torch.Tensor]]:
    return [sample(100 * step + MICROBATCHES * unit + number) for number in range(MICROBATCHES)]


def own_samples(model: ParallelModule, step: int) -> list[dict[str, torch.Tensor]]:
    return samples_of(torch.distributed.get_rank() // model.compute_config.plan_ngpus, step)


def accumulate(module: nn.Module, units: int, step: int) -> None:
    """Set the gradients of the sum over all samples of all units, in one process."""
    module.zero_grad()
    for unit in range(units):
        for each in samples_of(unit, step):
            module(each).backward()


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    """Compare this rank's parameters with those of one process."""
    theirs = dict(expected.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), theirs[name].detach(), rtol=1e-6, atol=1e-6)


def gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]


def built(module: nn.Module, *args: Any, **kwargs: Any) -> ParallelOptimizer:
    made: Any = build_optimizer(module, *args, **kwargs)
    assert isinstance(made, ParallelOptimizer)
    return made


def manual_and_automatic(plan: int, policy: str, use_zero: bool, **settings: Any) -> None:
    """Adam with clipping and scaling by hand, and by the step alone, as in one process."""
    for by_hand in (True, False):
        model, expected = end_to_end(plan, policy, use_zero=use_zero, **settings), whole()
        ours = built(model, torch.optim.Adam, lr=0.05)
        theirs = torch.optim.Adam(expected.parameters(), lr=0.05)
        assert isinstance(ours, Zero1Optimizer if use_zero else torch.optim.Adam)
        assert ours._non_parallel_module_reducer is None
        for step in range(STEPS):
            model.train_step(own_samples(model, step))
            accumulate(expected, RANKS // plan, step)
            if by_hand:
                with pytest.raises(RuntimeError, match=r"not summed over the units yet: call sync_shard_grad\(\)"):
                    ours.scale_grads(0.5)
                ours.sync_shard_grad()
                ours.scale_grads(0.5)
                for parameter in expected.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(0.5)
                measured = ours.clip_gnorm()
                torch.testing.assert_close(measured, ours.clip_gnorm(0.01))
                torch.testing.assert_close(measured, nn.utils.clip_grad_norm_(expected.parameters(), 0.01))
                torch.testing.assert_close(ours.clip_gnorm(0), torch.tensor(0.01))
            ours.step()
            theirs.step()
            # The sums stay, and are measured, until zero_grad.
            torch.testing.assert_close(ours.clip_gnorm(), nn.utils.clip_grad_norm_(expected.parameters(), 1e9))
            if "zero_use_reduce_scatter" not in settings:
                for name, parameter in model.named_parameters():
                    torch.testing.assert_close(parameter.grad, expected.get_parameter(name).grad)
            ours.zero_grad()
            assert not gradients(model.parameters())
        assert_same(model, expected)


def hooks(use_zero: bool, scattered: bool = False) -> None:
    """The seed's example: scaled down before the sum, and up after it."""
    settings: dict[str, Any] = {"zero_use_reduce_scatter": scattered, "reducer_bucket_cap_mb": 3e-4}
    model, expected = end_to_end(use_zero=use_zero, **settings), whole()
    ours = built(model, torch.optim.SGD, lr=0.05)
    theirs = torch.optim.SGD(expected.parameters(), lr=0.05)
    seen: list[str] = []

    def hook(name: str, change: Callable[[torch.Tensor], object]) -> Callable[[Reducer, torch.Tensor], None]:
        def run(reducer: Reducer, grad: torch.Tensor) -> None:
            assert reducer.parameters
            seen.append(name)
            change(grad)

        return run

    ours.register_reducer_pre_hook(hook("first", lambda grad: grad.div_(RANKS)))
    ours.register_reducer_pre_hook(hook("second", lambda grad: grad.mul_(2)))
    ours.register_reducer_post_hook(hook("third", lambda grad: grad.mul_(RANKS / 2)))
    for step in range(2):
        model.train_step(own_samples(model, step))
        raw = gradients(model.parameters())
        ours.sync_shard_grad()
        assert scattered == all(map(torch.equal, raw, gradients(model.parameters())))
        accumulate(expected, RANKS, step)
        ours.step()
        theirs.step()
    assert seen[:2] == ["first", "second"]
    assert seen.count("first") == seen.count("second") == seen.count("third") > 2
    assert_same(model, expected)
    with pytest.raises(TypeError, match="a hook must be a function"):
        ours.register_reducer_pre_hook(1)  # type: ignore[arg-type]  # refused


def closures(use_zero: bool, with_sum: bool) -> None:
    """A closure computes the gradients of its step, with its own sum and without one."""
    model, expected = end_to_end(use_zero=use_zero), whole()
    ours = built(model, torch.optim.Adam, lr=0.05)
    theirs = torch.optim.Adam(expected.parameters(), lr=0.05)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (ours, theirs)]
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            model.train_step(own_samples(model, step))
            if with_sum:
                ours.sync_shard_grad()
            return 7.0 + step

        assert ours.step(closure) == 7.0 + step
        accumulate(expected, RANKS, step)
        theirs.step()
        for scheduler in schedulers:
            scheduler.step()
    assert_same(model, expected)


class Around(nn.Module):
    """A parallel module between plain ones."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = inner
        self.after = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(self.before(x)).tanh()).mean()  # type: ignore[no-any-return]


def around() -> Around:
    torch.manual_seed(1)
    return Around(Net())


def plain_parts(use_zero: bool, plan: int = 1, scattered: bool = False) -> None:
    """A parallel module between plain ones: their gradients are summed too, and each counts once in the norm."""
    config = ComputeConfig(plan, RANKS, use_zero=use_zero, zero_use_reduce_scatter=scattered)
    model = around()
    inner = parallelize(model.inner, {"x": sample(0)["data"]}, "tp" if plan > 1 else "dp", config)
    assert isinstance(inner, ParallelModule)
    model.inner = inner
    expected = around()

    def factory(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        matrices = {"params": [each for each in parameters if each.dim() > 1], "weight_decay": 0.1}
        rest: dict[str, Any] = {"params": [each for each in parameters if each.dim() < 2]}
        return torch.optim.AdamW([matrices, rest], lr=lr, weight_decay=0.0)

    ours = built(model, factory, config if use_zero else None, lr=0.05)
    reducer = ours._non_parallel_module_reducer
    assert reducer is not None
    assert use_zero or len(reducer.parameters) == 4
    theirs = factory(list(expected.parameters()), 0.05)
    for step in range(STEPS):
        model(sample(10 * step + torch.distributed.get_rank() // plan)["data"]).backward()
        for unit in range(RANKS // plan):
            expected(sample(10 * step + unit)["data"]).backward()
        torch.testing.assert_close(ours.clip_gnorm(0.5), nn.utils.clip_grad_norm_(expected.parameters(), 0.5))
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    for part in ("before", "after") if plan > 1 else ("",):
        assert_same(model.get_submodule(part), expected.get_submodule(part))
    # Without zero_grad a backward would add to the sums. After a reduce-scatter it adds to this unit's gradients.
    model(sample(0)["data"]).backward()
    ours.sync_shard_grad()
    if not scattered:
        with pytest.raises(RuntimeError, match="a backward adds to the gradient"):
            model(sample(0)["data"]).backward()
    ours.zero_grad()


def refusals() -> None:
    model = end_to_end()
    adam = torch.optim.Adam
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (RuntimeError, "Linear has no parallel module in it", lambda: built(nn.Linear(1, 1), adam)),
        (RuntimeError, "is end-to-end and inside of a Sequential", lambda: built(nn.Sequential(model), adam)),
        (TypeError, "must return a plain optimizer", lambda: built(model, lambda parameters: None)),
        (ValueError, "LBFGS follows the loss of one unit", lambda: built(model, torch.optim.LBFGS)),
        (
            ValueError,
            "the same plan_ngpus and runtime_ngpus everywhere, and was given {'plan_ngpus': 1",
            lambda: built(model, adam, ComputeConfig(2, RANKS)),
        ),
        (
            TypeError,
            "with parameters that it was not given",
            lambda: built(model, lambda parameters: adam([nn.Parameter(torch.ones(1))])),
        ),
        (RuntimeError, "makes parallel optimizers", lambda: ParallelOptimizer([nn.Parameter(torch.ones(1))])),
    ]
    for kind, text, call in refused:
        with pytest.raises(kind, match=text):
            call()


def grouped_state() -> None:
    """Each of two groups of two units has the whole state, and a unit half of it."""
    model, expected = end_to_end(use_zero=True, zero_ngroups=2), whole()
    ours: Any = built(model, torch.optim.Adam, lr=0.05)
    theirs = torch.optim.Adam(expected.parameters(), lr=0.05)
    model.train_step(own_samples(model, 0))
    accumulate(expected, RANKS, 0)
    ours.step()
    theirs.step()
    assert sum(values.numel() for _, values, _ in ours.shards()) * 2 == sum(each.numel() for each in model.parameters())
    states = parallel_state.get_exchange().gather((model.state_dict(), ours.state_dict()))
    _, merged = merge_state_dicts([module for module, _ in states], [optimizer for _, optimizer in states])
    assert merged is not None
    for index, values in theirs.state_dict()["state"].items():
        torch.testing.assert_close(merged["state"][index]["exp_avg"], values["exp_avg"].cpu())
    # The first group keeps the state in deduplicated dicts, and sends it to the other.
    kept: Any = deduped_state_dict(model, ours)
    assert bool(kept[1]["state"]) == (torch.distributed.get_rank() < 2)
    again: Any = built(model, torch.optim.Adam, lr=0.1)
    load_deduped_state_dict(model, kept[0], again, kept[1])
    assert str(again.state_dict()) == str(ours.state_dict())
    of_all = parallel_state.get_exchange().gather(kept)
    _, joined = merge_state_dicts([module for module, _ in of_all], [optimizer for _, optimizer in of_all])
    assert str(joined) == str(merged)


def saved_state(use_zero: bool, zero_ngroups: int = 1) -> None:
    """A state dict is that of its rank, and goes on in another optimizer."""
    model = end_to_end(use_zero=use_zero, zero_ngroups=zero_ngroups)
    first = built(model, torch.optim.Adam, lr=0.05)
    model.train_step(own_samples(model, 0))
    first.step()
    state = first.state_dict()
    assert state["nxdpp_extra_state"]["names"] == list(dict(whole().named_parameters()))
    again = built(model, torch.optim.Adam, lr=0.1)
    again.load_state_dict(state)
    assert again.param_groups[0]["lr"] == 0.05
    assert str(again.state_dict()) == str(state)


def run_cases(rank: int) -> None:
    for use_zero in (False, True):
        manual_and_automatic(1, "dp", use_zero)
        hooks(use_zero)
        closures(use_zero, with_sum=True)
        closures(use_zero, with_sum=False)
        plain_parts(use_zero)
        saved_state(use_zero)
    for settings in ({"zero_ngroups": 2}, {"zero_ngroups": 4}):
        manual_and_automatic(1, "dp", True, **settings)
    hooks(True, scattered=True)
    plain_parts(True, scattered=True)
    saved_state(True, 2)
    grouped_state()
    refusals()
    parallel_state.destroy_model_parallel()
    for use_zero in (False, True):
        manual_and_automatic(2, "pp", use_zero)
    parallel_state.destroy_model_parallel()
    for use_zero in (False, True):
        plain_parts(use_zero, plan=2)


def test_steps_are_those_of_one_process() -> None:
    run_ranks(RANKS, run_cases, timeout=200)
