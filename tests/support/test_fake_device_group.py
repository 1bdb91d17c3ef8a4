"""The process group of the fake accelerator has NCCL's rules, and torch's own parallel wrappers run on it."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import fake_device
from tests.support.fake_device import deadlock
from tests.support.run_ranks import run_ranks
from tests.support.test_fake_device import error_of

REASON = fake_device.why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(900),
    pytest.mark.cpu_only("its ranks start the fake accelerator"),
]


@pytest.fixture(scope="module", autouse=True)
def _built_for_groups() -> None:
    fake_device.built()


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return run_ranks(world_size, _grouped, function, args, timeout=120)


def _grouped(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    fake_device.install()
    assert dist.Backend.default_device_backend_map["fake"] == "fccl"
    dist.init_process_group("fccl", timeout=timedelta(seconds=60))
    result = function(rank, *args)
    dist.destroy_process_group()
    return result


def _collectives(rank: int, device: str) -> list[torch.Tensor]:
    size = dist.get_world_size()
    own = torch.arange(4, dtype=torch.float32, device=device) + rank
    results = []
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        results.append(own.clone())
        dist.all_reduce(results[-1], operation)
    results.append(torch.empty(4 * size, device=device))
    dist.all_gather_into_tensor(results[-1], own)
    gathered = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(gathered, own)
    results += gathered
    results.append(torch.empty(4, device=device))
    dist.reduce_scatter_tensor(results[-1], torch.ones(4 * size, device=device) * (rank + 1))
    results.append(own.clone())
    dist.broadcast(results[-1], size - 1)
    results.append(torch.empty(2 * size, dtype=torch.bfloat16, device=device))
    dist.all_to_all_single(results[-1], torch.arange(2 * size, device=device).bfloat16() + rank)
    results.append(own.clone())
    dist.reduce(results[-1], 0)
    if rank:
        results.pop()
    pieces = [torch.empty(4, device=device) for _ in range(size)] if rank == 0 else None
    dist.gather(own, pieces)
    results += pieces or []
    results.append(torch.empty(4, device=device))
    dist.scatter(results[-1], [own * i for i in range(size)] if rank == 0 else None)
    flag = torch.tensor([rank == 1], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX if device == "cpu" else dist.ReduceOp.SUM) if device != "cpu" else None
    dist.barrier()
    return [result.cpu() for result in results]


def _on_gloo(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    dist.init_process_group("gloo")
    result = function(rank, *args)
    dist.destroy_process_group()
    return result


def test_collectives_equal_those_of_gloo() -> None:
    found = on_ranks(3, _collectives, "fake")
    expected = run_ranks(3, _on_gloo, _collectives, ("cpu",), timeout=120)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def _messages(rank: int) -> list[float]:
    # In the order of the calls, whatever the tags are.
    if rank == 0:
        kept = [torch.full((2,), float(i), device="fake") for i in range(3)]
        for work in [dist.isend(tensor, 1, tag=9 - i) for i, tensor in enumerate(kept)]:
            assert work is not None
            work.wait()
        return []
    received = [torch.empty(2, device="fake") for _ in range(3)]
    for work in [dist.irecv(tensor, 0, tag=i) for i, tensor in enumerate(received)]:
        assert work is not None
        work.wait()
    return [tensor[0].item() for tensor in received]


def test_messages_match_in_order_without_tags() -> None:
    assert on_ranks(2, _messages) == [[], [0.0, 1.0, 2.0]]


def _races(rank: int) -> list[str]:
    tensor = torch.ones(4, device="fake")
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    errors = [error_of(lambda: tensor + 1), error_of(lambda: tensor.zero_())]
    work.wait()
    assert tensor.sum().item() == 8
    if rank == 0:
        work = dist.isend(tensor, 1)
        assert work is not None
        # It may be read, and not written.
        assert (tensor + 1).sum().item() == 12
        errors.append(error_of(lambda: tensor.zero_()))
    else:
        work = dist.irecv(tensor, 0)
        assert work is not None
        errors.append(error_of(lambda: tensor + 1))
    work.wait()
    tensor.zero_()
    return errors


def test_results_exist_after_the_wait_only() -> None:
    for rank, (read, written, message) in enumerate(on_ranks(2, _races)):
        assert "a race of two streams" in read
        assert "all_reduce" in read
        assert "writes memory in aten::zero_" in written
        assert ("send" if rank == 0 else "recv") in message


def _waits(rank: int) -> list[Any]:
    tensor = torch.ones(4, device="fake")
    dist.all_reduce(tensor)
    started = time.monotonic()
    if rank == 1:
        time.sleep(1.0)
    with fake_device.host_waits() as waits:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        doubled = tensor * 2
    took = time.monotonic() - started
    return [took, len(waits), doubled.sum().item()]


def test_wait_stops_the_stream_and_not_the_host() -> None:
    first, second = on_ranks(2, _waits)
    assert first[0] < 0.5
    assert second[0] >= 1.0
    assert first[1:] == second[1:] == [0, 32.0]


def _never_comes(rank: int) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    tensor = torch.ones(4, device="fake")
    dist.all_reduce(tensor, group=group)
    torch.accelerator.synchronize()
    if rank == 1:
        time.sleep(6)
    dist.all_reduce(tensor, group=group)
    torch.accelerator.synchronize()


def test_timeout_ends_the_process() -> None:
    with pytest.raises(AssertionError, match="The process ends, as NCCL's watchdog does it") as caught:
        on_ranks(2, _never_comes)
    assert "SIGABRT" in str(caught.value)


def _aborts(rank: int) -> str:
    group = dist.new_group([0, 1])
    tensor = torch.ones(4, device="fake")
    dist.all_reduce(tensor, group=group)
    torch.accelerator.synchronize()
    error = ""
    if rank == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        group._get_backend(torch.device("fake")).abort()
        torch.accelerator.synchronize()
        error = error_of(work.wait)
    dist.barrier()
    return error


def test_abort_ends_what_waits() -> None:
    assert "the communicator was aborted" in on_ranks(2, _aborts)[0]


def _two_communicators(rank: int) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    tensors = [torch.ones(4, device="fake") for _ in range(2)]
    for group, tensor in ((first, tensors[0]), (second, tensors[1])):
        dist.all_reduce(tensor, group=group)
    torch.accelerator.synchronize()
    order = [first, second] if rank == 0 else [second, first]
    works = [dist.all_reduce(tensors[group is second], group=group, async_op=True) for group in order]
    for work in works:
        assert work is not None
        work.wait()
    torch.accelerator.synchronize()


def test_circle_of_two_communicators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_LOG", str(tmp_path))
    on_ranks(2, _two_communicators)
    stuck = deadlock.replay(deadlock.read(tmp_path))
    assert [each.rank for each in stuck] == [0, 1]
    assert [each.waits_for for each in stuck] == [(1,), (0,)]
    assert all("all_reduce" in each.operation for each in stuck)
