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
)
from tests.doors.nnscaler.own_folders import parallelize
from tests.doors.nnscaler.trained_modules import Mlp, TiedMlp, sample
from tests.support.run_ranks import run_ranks

RANKS, STEPS, MICROBATCHES = 4, 2, 2


def whole(policy: str = "dp") -> Mlp:
    """A module; stages of a pipeline share a weight of it."""
    torch.manual_seed(0)
    return TiedMlp() if policy == "pp" else Mlp()


def end_to_end(plan: int = 1, policy: str = "dp", **settings: Any) -> ParallelModule:
    pas_config = {"pipeline_nmicros": MICROBATCHES} if policy == "pp" else {}
    config = ComputeConfig(plan, RANKS, use_end2end=True, pas_config=pas_config, **settings)
    model = parallelize(whole(policy), {"data": sample(0)}, policy, config)
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
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected.get_parameter(name), rtol=1e-6, atol=1e-6)


def gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]


def built(module: nn.Module, *args: Any, **kwargs: Any) -> ParallelOptimizer:
    made: Any = build_optimizer(module, *args, **kwargs)
    assert isinstance(made, ParallelOptimizer)
    return made


def manual_and_automatic(plan: int, policy: str, use_zero: bool, **settings: Any) -> None:
    """Adam with clipping and scaling by hand, and by the step alone, as in one process."""
    for by_hand in (True, False):
        model, expected = end_to_end(plan, policy, use_zero=use_zero, **settings), whole(policy)
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


def run_cases(rank: int) -> None:
    manual_and_automatic(1, "dp", False)
    manual_and_automatic(1, "dp", True, zero_ngroups=2)
    hooks(False)
    hooks(True, scattered=True)
    closures(True, with_sum=True)
    closures(False, with_sum=False)
    parallel_state.destroy_model_parallel()
    manual_and_automatic(2, "pp", True)


def test_steps_are_those_of_one_process() -> None:
    run_ranks(RANKS, run_cases, timeout=200)
