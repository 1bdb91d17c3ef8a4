"""A step of Zero1Optimizer in parts: its gradients are those of the plain optimizer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import GradScaler, parallel_state
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from tests.gradients.optimizer.test_zero1 import assert_same, gradient, make, set_gradients, set_means
from tests.support.run_ranks import run_ranks


def both(
    reduction: str = "mean", whole_gradients: bool = False
) -> tuple[list[nn.Parameter], Zero1Optimizer, list[nn.Parameter], torch.optim.AdamW]:
    ours, theirs = make(), make()
    # Buckets of a few parameters each.
    kwargs: dict[str, Any] = {"reduction": reduction, "bucket_cap_mb": 1e-3, "whole_gradients": whole_gradients}
    optimizer = Zero1Optimizer(ours, torch.optim.AdamW, grad_clipping=False, lr=0.1, **kwargs)
    return ours, optimizer, theirs, torch.optim.AdamW(theirs, lr=0.1)


def set_sums(parameters: list[nn.Parameter], step: int) -> None:
    for index, parameter in enumerate(parameters):
        parameter.grad = gradient(0, step, index) + gradient(1, step, index)


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def in_parts(rank: int) -> None:
    ours, optimizer, theirs, plain = both()
    for step in range(3):
        set_gradients(ours, rank, step)
        set_means(theirs, step)
        for _ in range(2):
            optimizer.reduce_gradients()
        optimizer.scale_gradients(4.0)
        for parameter in theirs:
            assert parameter.grad is not None
            parameter.grad.mul_(4)
        measured = optimizer.gradient_norm()
        assert torch.equal(measured, optimizer.clip_gradients(2.0))
        torch.testing.assert_close(measured, nn.utils.clip_grad_norm_(theirs, 2.0))
        torch.testing.assert_close(optimizer.gradient_norm(), torch.tensor(2.0))
        # The gradients of this rank stay.
        assert_same(
            [p.grad for p in ours if p.grad is not None], [gradient(rank, step, n) for n in range(len(ours))], 0
        )
        optimizer.step()
        plain.step()
        assert all(piece.tensor.grad is None for piece in optimizer._sharded.pieces())
        # As in a step without parts, the next one adds to the gradients of this rank, unless they are removed.
        optimizer.zero_grad()
    assert_same(ours, theirs)


def sums(rank: int) -> None:
    ours, optimizer, theirs, plain = both("sum")
    for step in range(2):
        set_gradients(ours, rank, step)
        set_sums(theirs, step)
        optimizer.step()
        plain.step()
    assert_same(ours, theirs)


def whole_gradients(rank: int) -> None:
    """``.grad`` is the sum from the reduction on, after the step too, and is scaled and clipped as the pieces are."""
    ours, optimizer, theirs, plain = both("sum", True)
    for step in range(3):
        set_gradients(ours, rank, step)
        set_sums(theirs, step)
        # Replica 1 has no gradient of the first parameter.
        theirs[0].grad = gradient(0, step, 0)
        if rank:
            ours[0].grad = None
        if step:
            optimizer.reduce_gradients()
            optimizer.scale_gradients(0.5)
            for parameter in theirs:
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
            torch.testing.assert_close(optimizer.clip_gradients(2.0), nn.utils.clip_grad_norm_(theirs, 2.0))
        optimizer.step()
        plain.step()
        optimizer.reduce_gradients()
        assert_same([p.grad for p in ours if p.grad is not None], [p.grad for p in theirs if p.grad is not None])
        torch.testing.assert_close(optimizer.gradient_norm(), nn.utils.clip_grad_norm_(theirs, 1e9))
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in ours)
    assert_same(ours, theirs)
    # A program may change the sums, through ``.data`` too.
    set_gradients(ours, rank, 3)
    set_sums(theirs, 3)
    optimizer.reduce_gradients()
    for parameters in (ours, theirs):
        for place, parameter in enumerate(parameters):
            gradient_of(parameter).data.mul_(0.25 * place)
        nn.utils.clip_grad_norm_(parameters, 0.5)
    torch.testing.assert_close(optimizer.gradient_norm(), torch.tensor(0.5))
    optimizer.step()
    plain.step()
    assert_same(ours, theirs)
    gradient_of(ours[1]).add_(1)
    with pytest.raises(RuntimeError, match="was changed after it was reduced, and the step would ignore that"):
        optimizer.scale_gradients(2.0)
    optimizer.zero_grad()
    set_gradients(ours, rank, 4)
    optimizer.reduce_gradients()
    set_gradients(ours, rank, 4)
    with pytest.raises(RuntimeError, match=r"put in the place of gradients after .* and would be reduced again"):
        optimizer._reduction.is_done()


def scaled_afterwards(rank: int) -> None:
    """A scaler after the reduction unscales the results, and finds an overflow of a sum."""
    for whole in (False, True):
        ours, optimizer, theirs, plain = both("sum", whole)
        scaler = GradScaler(init_scale=4.0)
        scaler.begin_step(torch.empty(0).device)
        for step in range(3):
            set_gradients(ours, rank, step)
            set_sums(theirs, step)
            for parameter in ours:
                gradient_of(parameter).mul_(scaler.get_scale())
            if step == 1:
                # Finite on each replica.
                gradient_of(ours[0]).fill_(3e38)
            optimizer.reduce_gradients()
            scaler.unscale_(optimizer)
            if step != 1:
                torch.testing.assert_close(optimizer.clip_gradients(2.0), nn.utils.clip_grad_norm_(theirs, 2.0))
                plain.step()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert_same(ours, theirs)
        assert scaler.get_scale() == 2.0


def hooks(rank: int) -> None:
    ours, optimizer, theirs, plain = both("sum")
    seen: list[str] = []

    def times(name: str, factor: float) -> Callable[[torch.Tensor], None]:
        def run(flat: torch.Tensor) -> None:
            assert flat.dim() == 1
            seen.append(name)
            flat.mul_(factor)

        return run

    set_gradients(ours, rank, 0)
    set_sums(theirs, 0)
    optimizer.reduce_gradients([times("first", 0.5), times("second", 0.25)], [times("third", 8.0)])
    # In parts of this rank's own: padding and pieces of other ranks are not in the result.
    assert seen.count("first") == seen.count("second") == seen.count("third") > 1
    assert seen[:2] == ["first", "second"]
    torch.testing.assert_close(optimizer.gradient_norm(), nn.utils.get_total_norm([p.grad for p in theirs]))  # type: ignore[misc]  # each has one
    optimizer.step()
    plain.step()
    assert_same(ours, theirs)


def new_gradients(rank: int) -> None:
    """Gradients that a program removes and computes again are reduced again, and changed ones are refused."""
    ours, optimizer, theirs, plain = both()
    set_gradients(ours, rank, 7)
    optimizer.reduce_gradients()
    optimizer.zero_grad()
    set_gradients(ours, rank, 8)
    optimizer.reduce_gradients()
    # Without the optimizer's zero_grad.
    set_gradients(ours, rank, 0)
    set_means(theirs, 0)
    optimizer.reduce_gradients()
    optimizer.step()
    plain.step()
    assert_same(ours, theirs)
    set_gradients(ours, rank, 1)
    optimizer.reduce_gradients()
    ours[0].grad.mul_(2)  # type: ignore[union-attr]  # it has one
    with pytest.raises(
        RuntimeError, match=r"gradient of a parameter of shape \[7, 3\] was changed after it was reduced"
    ):
        optimizer._reduction.is_done()
    with pytest.raises(RuntimeError, match="a backward adds to the gradient"):
        ours[1].sum().backward()
    optimizer.zero_grad()


def options_between(rank: int) -> None:
    """A learning rate that is set after the reduction counts."""
    ours, optimizer, theirs, plain = both()
    set_gradients(ours, rank, 0)
    set_means(theirs, 0)
    optimizer.reduce_gradients()
    for group in (*optimizer.param_groups, *plain.param_groups):
        group["lr"] = 0.5
    optimizer.step()
    plain.step()
    assert_same(ours, theirs)


def refusals(rank: int) -> None:
    ours, optimizer, _, _ = both()
    for early in (optimizer.gradient_norm, lambda: optimizer.scale_gradients(2.0), lambda: optimizer.clip_gradients(1)):
        with pytest.raises(RuntimeError, match=r"not reduced yet: call reduce_gradients\(\) first"):
            early()
    with pytest.raises(ValueError, match="max_norm must be above 0, not 0"):
        optimizer.clip_gradients(0)
    with pytest.raises(ValueError, match="reduction='max' must be 'mean'"):
        Zero1Optimizer(ours, torch.optim.AdamW, reduction="max")


CASES: list[Callable[[int], None]] = [
    in_parts,
    sums,
    whole_gradients,
    scaled_afterwards,
    hooks,
    new_gradients,
    options_between,
    refusals,
]


def run_cases(rank: int) -> None:
    parallel_state.initialize_model_parallel()
    for case in CASES:
        case(rank)


def test_parts_of_a_step_over_two_replicas() -> None:
    run_ranks(2, run_cases)


def alone(rank: int) -> None:
    parallel_state.initialize_model_parallel()
    ours, optimizer, _, _ = both("sum")
    set_gradients(ours, 0, 0)
    optimizer.reduce_gradients([lambda flat: flat.mul_(2)], [lambda flat: flat.mul_(3)])
    optimizer.reduce_gradients()
    expected = nn.utils.get_total_norm([6 * gradient(0, 0, index) for index in range(len(ours))])
    torch.testing.assert_close(optimizer.gradient_norm(), expected)


def test_one_replica_runs_hooks() -> None:
    run_ranks(1, alone)
