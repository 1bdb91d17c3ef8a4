"""The average over replicas begins during the last backwards, with the gradients of the average after them."""

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.gradients import buckets
from nxdpp.pipeline.backward.structure import HOOKS_ARE_SHOWN
from tests.support.models import gradient_differences, make, padded_batch, reference, train_in_one_process
from tests.support.run_ranks import run_ranks

SCHEDULES = ("1f1b", "zb-v")


def gradients(wrapped: NxDPPModel) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in wrapped.local_named_parameters()}


def assert_equal(ours: dict[str, torch.Tensor | None], theirs: dict[str, torch.Tensor | None]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        other = theirs[name]
        assert (gradient is None) == (other is None), name
        assert gradient is None or other is None or torch.equal(gradient, other), name


def assert_averaged(wrapped: NxDPPModel, whole: list[nn.Module]) -> None:
    """Compare with the average of two models of one process, and free all gradients."""
    first, second = (dict(model.named_parameters(remove_duplicate=False)) for model in whole)
    for name, gradient in gradients(wrapped).items():
        one, other = first[name].grad, second[name].grad
        assert gradient is not None
        assert one is not None
        assert other is not None
        torch.testing.assert_close(gradient, one / 2 + other / 2, rtol=0, atol=0)
    for model in (wrapped, *whole):
        model.zero_grad()


def own(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    size, rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    return {name: value.chunk(size)[rank] for name, value in batch.items()}


def every_schedule() -> None:
    """The first step averages after its end, the second one during it: gradients are equal bit for bit."""
    batch = padded_batch(8, length=6)
    whole = reference(make("tied_llama"))
    train_in_one_process(whole, batch, 4)
    for schedule in SCHEDULES:
        wrapped = NxDPPModel(make("tied_llama"), num_microbatches=2, schedule=schedule)
        wrapped.run_train(**own(batch))
        assert wrapped.last_average.early_bytes == 0
        after = gradients(wrapped)
        differences = gradient_differences(wrapped, whole)
        assert all(distance is not None and distance < 1e-5 for distance in differences.values()), differences
        wrapped.zero_grad()
        wrapped.run_train(**own(batch))
        assert_equal(gradients(wrapped), after)
        report = wrapped.last_average
        assert report.sent_bytes == sum(parameter.nbytes for parameter in wrapped.local_parameters())
        # Where weight-gradients do not wait (torch 2.9), a split schedule ends with empty actions.
        assert 0.5 < report.early_share <= 1 or (schedule == "zb-v" and not HOOKS_ARE_SHOWN)
        # Gradients add up. The average of earlier ones is what they were.
        wrapped.run_train(**own(batch))
        for name, gradient in gradients(wrapped).items():
            earlier = after[name]
            assert gradient is not None
            assert earlier is not None
            torch.testing.assert_close(gradient, 2 * earlier)


def without_averages() -> None:
    """Steps in ``no_sync`` add up on each replica, tied weights too."""
    whole = [reference(make("tied_llama", layers=2)) for _ in range(2)]
    wrapped = NxDPPModel(make("tied_llama", layers=2), num_microbatches=1)
    for round_ in range(2):
        batches = [padded_batch(4, length=6, seed=2 * round_ + each) for each in range(2)]
        # Contexts may be nested, and end by errors: the outer one goes on.
        with wrapped.no_sync():
            with pytest.raises(KeyError), wrapped.no_sync():
                raise KeyError
            wrapped.run_train(**own(batches[0]))
        wrapped.run_train(**own(batches[1]))
        for replica, model in enumerate(whole):
            for batch in batches:
                train_in_one_process(model, {name: value.chunk(2)[replica] for name, value in batch.items()}, 1)
        assert_averaged(wrapped, whole)


class Expert(nn.Module):
    """Layer whose second half computes for positive inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, 6)."""
        y = self.always(x) + x
        result: torch.Tensor = self.sometimes(y) if bool(x.detach().sum() > 0) else y
        return result


class Experts(nn.Module):
    """Four layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def missing_gradients() -> None:
    """Gradients that are missing on some replicas, or appear in a later step, are averaged as after the step."""
    torch.manual_seed(1)
    module = Experts()
    wrapped = NxDPPModel(copy.deepcopy(module), num_microbatches=2)
    fresh = None
    replica = parallel_state.get_data_parallel_rank()
    for step, signs in enumerate([(1, -1), (-1, -1), (-1, 1)]):
        x = signs[replica] * (1 + torch.rand(4, 6, generator=torch.Generator().manual_seed(9 * step + replica)))
        fresh = NxDPPModel(copy.deepcopy(module), num_microbatches=2)
        for each in (wrapped, fresh):
            each.zero_grad()
            each.run_train(x=x)
        assert_equal(gradients(wrapped), gradients(fresh))
        assert fresh.last_average.early_bytes == 0
        assert all(p.grad is None for name, p in wrapped.local_named_parameters() if ".never." in name)
    assert wrapped.last_average.early_bytes > 0


CASES: list[Callable[[], None]] = [
    every_schedule,
    without_averages,
    missing_gradients,
]


def run_cases(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    # Buckets of a few tensors.
    buckets.BUCKET_BYTES = 2**14
    for case in CASES:
        case()


def test_two_stages_and_two_replicas() -> None:
    run_ranks(4, run_cases, timeout=200)


def differ(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    wrapped = NxDPPModel(make("llama", layers=2), num_microbatches=1)
    with wrapped.no_sync() if rank == 1 else contextlib.nullcontext():
        wrapped.run_train(**padded_batch(2, length=6))


def test_no_sync_on_one_rank_of_a_pipeline_is_refused() -> None:
    with pytest.raises(
        AssertionError, match=r"\(rank 1\) runs a step in no_sync\(\), and .*\(rank 0\) runs it outside"
    ):
        run_ranks(2, differ)
