"""Defects, each put back: the fake accelerator finds it, and finds nothing without it.

No row leaves out a wait in host memory, for what goes over gloo and for the descriptions of tensors: the CPU shows it.
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxdpp import GradScaler, NxDPPModel, fully_shard, parallel_state
from nxdpp.devices.accelerator import Accelerator
from nxdpp.devices.kinds import device_of
from nxdpp.gradients import buckets, grad_scaler, overlapped_average
from nxdpp.gradients.buckets import SentBucket
from nxdpp.gradients.overlapped_average import OverlappedAverage
from nxdpp.gradients.shards.unit import ShardedUnit
from nxdpp.pipeline.local.tied_weights import TiedWeights
from nxdpp.pipeline.p2p.channel import RemoteChannel
from nxdpp.pipeline.p2p.transport import Transport
from nxdpp.pipeline.stages import answered_call
from nxdpp.ranks.faults.board import StreamWaits, board
from nxdpp.ranks.faults.local_peers import LocalPeers
from nxdpp.ranks.faults.progress import Progress
from nxdpp.ranks.faults.roll_call import own_answer
from nxdpp.ranks.faults.timeouts import Timeouts
from tests.support import fake_device
from tests.support.fake_device import deadlock
from tests.support.models import make, padded_batch
from tests.support.run_ranks import run_ranks

REASON = fake_device.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

ROWS, WIDTH, MICROBATCHES, STEPS = 8, 8, 4, 3
SLOW_SECONDS = 1.5
Batch = dict[str, torch.Tensor]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module", autouse=True)
def _built_to_find() -> None:
    fake_device.built()


# ---- What ranks run; each returns what is wrong, in words.


def _plain(block: "Block", x: torch.Tensor) -> torch.Tensor:
    return x + block.linear(x).tanh()  # type: ignore[no-any-return]


def _transposed(block: "Block", x: torch.Tensor) -> torch.Tensor:
    return _plain(block, x.reshape(len(x), -1, 4)).transpose(1, 2)


def _complex(block: "Block", x: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(x).flatten(1) if x.is_complex() else x
    return torch.view_as_complex(_plain(block, real).view(len(x), -1, 2))


def _on_the_side(block: "Block", x: torch.Tensor) -> torch.Tensor:
    if x.device.type != "fake":
        # The trace asks for the shape.
        return _plain(block, x)
    with torch.no_grad():
        doubled, side = x * 2, torch.Stream("fake")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            doubled.abs()
        record_stream(doubled, side)
        del doubled
        x.clone()
        torch.accelerator.current_stream().wait_stream(side)
    return _plain(block, x)


def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Tell the allocator that a stream uses the tensor."""
    tensor.record_stream(stream)


def _slow(block: "Block", x: torch.Tensor) -> torch.Tensor:
    time.sleep(block.seconds)
    return _plain(block, x)


class Block(nn.Module):
    asks = False

    def __init__(self, compute: Callable[["Block", torch.Tensor], torch.Tensor], width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.compute, self.seconds = compute, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.asks:
            self.largest = x.abs().max().item()
        x = self.compute(self, x)
        self.kept = x.detach()
        return x


class Blocks(nn.Module):
    def __init__(self, compute: Any = _plain, layers: int = 4, is_tied: bool = False, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gives_complex, width = compute is _complex, 4 if compute is _transposed else WIDTH
        self.blocks = nn.ModuleList(Block(compute, width) for _ in range(layers))
        # Torch unties parameters that it moves to a type of another package.
        self.to(device, torch.float64)
        if is_tied:
            cast(Any, self.blocks[-1]).linear.weight = cast(Any, self.blocks[0]).linear.weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = torch.view_as_real(x) if self.gives_complex else x
        return nn.functional.mse_loss(x.reshape(len(x), -1), labels)


def batch_of(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for name in ("x", "labels")}


def expanded_batch_of(step: int) -> Batch:
    return {name: tensor[:1].expand(ROWS, WIDTH) for name, tensor in batch_of(step).items()}


def pinned_batch_of(step: int) -> Batch:
    return {name: tensor.pin_memory() for name, tensor in batch_of(step).items()}


@contextmanager
def world(stages: int) -> Iterator[None]:
    """A start of the ranks, which is over after the block if that raises nothing."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages, device="fake", hang_timeout=100)
    yield
    parallel_state.destroy_model_parallel()


def wrapped(module: nn.Module, **settings: Any) -> NxDPPModel:
    layer = {"transformer_layer_cls": Block} if isinstance(module, Blocks) else {}
    settings = {"broadcast_and_average_loss": True, **layer, **settings}
    model = NxDPPModel(module, num_microbatches=MICROBATCHES, **settings)
    model.move_model_to_device()
    return model


def hold(rank: int, seconds: float) -> None:
    """Let the stream of rank 0 wait for a message of rank 1, which comes later; its host goes on."""
    message = torch.zeros(1, device="fake")
    if rank:
        time.sleep(seconds)
        dist.send(message, 0)
    else:
        dist.recv(message, 1)


@dataclass(frozen=True)
class Trains:
    """Steps of ``Blocks``, compared with one process; the host must not wait in the last one."""

    compute: Any = _plain
    stages: int = 2
    batches: Callable[[int], Batch] = batch_of
    change: Callable[[NxDPPModel], object] = str
    is_tied: bool = False
    holds: bool = False

    def __call__(self, rank: int) -> list[str]:
        with world(self.stages):
            model = wrapped(Blocks(self.compute, is_tied=self.is_tied))
            whole = Blocks(self.compute, is_tied=self.is_tied, device="fake")
            self.change(model)
            if self.is_tied:
                for each in (model, whole):
                    tied = dict(each.named_parameters())["blocks.0.linear.weight"]
                    tied.register_hook(lambda gradient: gradient.mul_(0.5))
                    with torch.no_grad():
                        tied.mul_(2)
            if self.holds:
                hold(rank, 0.0)
            replicas, replica = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole)]
            for step in range(STEPS):
                batch = self.batches(step)
                own = {name: tensor.chunk(replicas)[replica] for name, tensor in batch.items()}
                pieces = [tensor.to("fake").chunk(MICROBATCHES * replicas) for tensor in batch.values()]
                if self.holds and step == STEPS - 1:
                    hold(rank, 0.5)
                with fake_device.host_waits() as waits:
                    model.run_train(**own)
                changed = list(own.values()) if self.holds else []
                # Layers may change what they have kept after the step.
                changed += [block.kept for block in model.local_module.modules() if isinstance(block, Block)]
                for tensor in changed:
                    tensor.zero_()
                for rows in zip(*pieces, strict=True):
                    (whole(*rows) / len(pieces[0])).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            found = [] if dist.get_backend() == dist.Backend.GLOO else [f"the host waits in {place}" for place in waits]
            expected = dict(whole.named_parameters())
            for name, parameter in model.local_named_parameters():
                ours = cast(Any, parameter).full_tensor() if hasattr(parameter, "full_tensor") else parameter
                if not torch.allclose(ours, expected[name], rtol=1e-9, atol=1e-12):
                    found.append(f"{name} is wrong")
        return found


def asks_for_masks(rank: int) -> list[str]:
    """Steps of a Llama with padded rows."""
    with world(2):
        model, batch = wrapped(make("llama")), padded_batch(ROWS)
        for _ in range(STEPS):
            with fake_device.host_waits() as waits:
                model.run_train(**batch)
    return [f"the host waits in {place}" for place in waits]


def scales(rank: int) -> list[str]:
    """Steps of a scaler: its answer is the one wait for other ranks."""
    with world(2):
        scaler = GradScaler("fake", init_scale=8.0)
        model = wrapped(Blocks().float(), grad_scaler=scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            model.run_train(**{name: tensor.float() for name, tensor in batch_of(step).items()})
            with fake_device.host_waits() as waits:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [f"the host waits in {place}" for place in waits if "copy_ from the host" in place]


def compares_infinities(rank: int) -> list[str]:
    """A step whose gradients are infinite, compared with one process."""
    with world(2):
        model, batch = wrapped(Blocks(), check_against_module="first"), batch_of(0)
        batch["labels"][0] = torch.inf
        model.run_train(**batch)
    return []


def copies_to_the_host(rank: int) -> list[str]:
    """Copies behind a message that has not come."""
    with world(2):
        tensor, device = torch.arange(4, device="fake"), parallel_state.local_device()
        hold(rank, 0.0)
        hold(rank, 0.5)
        found = device_of(device).to_host(tensor)().tolist()
        torch.accelerator.synchronize()
    return [] if found == [0, 1, 2, 3] else [f"the host has read {found}"]


def waits_for_a_slow_rank(rank: int) -> list[str]:
    """Answer of rank 0 to a roll call, while its device waits for rank 1, and its host reads a gradient."""
    told: list[str] = []

    def tell() -> None:
        peers = cast(LocalPeers, SimpleNamespace(stopped=list, running=list))
        told.append(own_answer(board, Progress(board, 20.0), peers).state)

    with world(2):
        model = wrapped(Blocks(_slow), broadcast_and_average_loss=False)
        for step in range(STEPS):
            for block in model.local_module.modules():
                if isinstance(block, Block):
                    block.seconds = SLOW_SECONDS / 8 * rank * (step == STEPS - 1)
            model.run_train(**batch_of(step))
            timer = threading.Timer(SLOW_SECONDS / 2, tell)
            if step == STEPS - 1:
                timer.start()
            for parameter in model.local_parameters():
                assert parameter.grad is not None
                parameter.grad.sum().item()
        timer.join()
    return [f"rank 0 is told to be {state}" for state in told if rank == 0 and state != "waits"]


def averages_in_one_order(rank: int) -> list[str]:
    """Two replicas of two ranks with two stages each, and the replay of their operations with one hardware queue."""
    folder = Path(tempfile.gettempdir()) / f"nxdpp-finds-{os.environ['MASTER_PORT']}"
    folder.mkdir(exist_ok=True)
    os.environ["FAKE_LOG"] = str(folder)
    with world(2):
        model = wrapped(Blocks(layers=8).float(), schedule="interleaved")
        for step in range(STEPS):
            model.run_train(**{name: tensor.float() for name, tensor in batch_of(step).items()})
        dist.barrier()
        found = deadlock.replay(deadlock.read(folder))
    return [f"in a circle: {each.operation}" for each in found]


# ---- The defects.


class _Unwaited:
    def wait(self) -> None:
        """Return at once."""


def _no_wait_of_a_receive(patch: Patch) -> None:
    post = Transport.post_receive

    def unwaited(self: Transport, layout: Any, source: int, *more: Any) -> Any:
        posted = post(self, layout, source, *more)
        receive, *rest = self._receives[source]
        if not hasattr(receive, "is_unwaited"):

            def begun(*arguments: Any) -> _Unwaited:
                receive(*arguments)
                return _Unwaited()

            begun.is_unwaited = True  # type: ignore[attr-defined]
            self._receives[source] = (begun, *rest)  # type: ignore[assignment]
        return posted

    patch.setattr(Transport, "post_receive", unwaited)


def _no_wait_of_a_send(patch: Patch) -> None:
    def release(self: RemoteChannel, direction: Any, microbatch: int) -> None:
        self._sent.pop((direction, microbatch), None)

    patch.setattr(RemoteChannel, "release", release)


def _no_wait_of_tied_sends(patch: Patch) -> None:
    patch.setattr(TiedWeights, "_finish_sends", lambda self: self._sends.clear())


def _no_wait_of_equal_copies(patch: Patch) -> None:
    send = Transport.send
    patch.setattr(Transport, "send", lambda *arguments: (_Unwaited(), send(*arguments)[1]))


def _no_wait_of_an_average(patch: Patch) -> None:
    finish = SentBucket.finish
    patch.setattr(SentBucket, "finish", lambda self: finish(replace(self, work=None)))


def _no_wait_of_a_reduction(patch: Patch) -> None:
    patch.setattr(ShardedUnit, "finish", lambda self: self.streams.reduce_scatter_states.clear())


def _no_wait_of_a_copy_to_the_host(patch: Patch) -> None:
    def to_host(self: Accelerator, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        pinned = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        return lambda: pinned

    patch.setattr(Accelerator, "to_host", to_host)


def _from_host(how: Callable[[torch.Tensor, torch.device], torch.Tensor]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(Accelerator, "from_host", lambda self, tensor: how(tensor, self.device))


def _strides_are_dropped(patch: Patch) -> None:
    to_host = Accelerator.to_host
    patch.setattr(Accelerator, "to_host", lambda self, tensor: to_host(self, tensor.contiguous()))


def _the_scaler_copies_itself(patch: Patch) -> None:
    def own_copies(device: torch.device) -> Any:
        known = device_of(device)
        return SimpleNamespace(
            from_host=lambda tensor: tensor.to(device), to_host=known.to_host, submit=known.submit, fill=known.fill
        )

    patch.setattr(grad_scaler, "device_of", own_copies)


def _largest_of_all(patch: Patch) -> None:
    # The greatest value was not looked at by itself: an infinity was the limit of all others.
    to_num = torch.Tensor.nan_to_num
    patch.setattr(torch.Tensor, "nan_to_num", lambda tensor, *to: tensor if to == (0, 0) else to_num(tensor, *to))


def _buckets_by_arrival(patch: Patch) -> None:
    begin = OverlappedAverage.begin

    def changed(self: OverlappedAverage, *arguments: Any) -> None:
        self._waits_stop_streams = False
        begin(self, *arguments)

    patch.setattr(OverlappedAverage, "begin", changed)
    patch.setattr(SentBucket, "is_completed", lambda self: dist.get_rank() in (0, 3))


def _small_buckets(patch: Patch) -> None:
    patch.setattr(buckets, "BUCKET_BYTES", 300)
    patch.setattr(overlapped_average, "_COPIED_BYTES", 200)


def _over_gloo(patch: Patch) -> None:
    patch.setitem(dist.Backend.default_device_backend_map, "fake", "gloo")


class Row(NamedTuple):
    """A defect, what ranks run, and what is found. ``always`` is patched without the defect too."""

    defect: Callable[[Patch], object]
    program: Callable[[int], list[str]]
    found: str
    ranks: int = 2
    always: Callable[[Patch], object] = str


TABLE = {
    "wait of a receive": Row(_no_wait_of_a_receive, Trains(), "a race of two streams.*writes it in recv"),
    "wait of a send": Row(_no_wait_of_a_send, Trains(), "a race of two streams.*reads it in send"),
    "wait of the gradients of a tied weight": Row(
        _no_wait_of_tied_sends, Trains(is_tied=True), "a race of two streams.*reads it in send"
    ),
    "wait of the values of a tied weight": Row(
        _no_wait_of_equal_copies, Trains(is_tied=True), "a race of two streams.*reads it in send"
    ),
    "wait of an average": Row(_no_wait_of_an_average, Trains(stages=1), "a race of two streams.*all_reduce"),
    "wait of a reduction of shards": Row(
        _no_wait_of_a_reduction, Trains(stages=1, change=fully_shard), "it writes them in aten::div.*unit.py"
    ),
    "wait of a copy to the host": Row(
        _no_wait_of_a_copy_to_the_host, copies_to_the_host, r"the host has read \[-1, -1, -1, -1\]"
    ),
    "copy of a pinned batch": Row(
        _from_host(lambda tensor, device: tensor.to(device, non_blocking=True)),
        Trains(batches=pinned_batch_of, holds=True),
        "blocks.0.linear.weight is wrong",
    ),
    "copy by way of pinned memory": Row(
        _from_host(lambda tensor, device: tensor.to(device)), Trains(), "the host waits in copy_ from the host"
    ),
    "record_stream": Row(
        lambda patch: patch.setitem(globals(), "record_stream", lambda *_: None),
        Trains(_on_the_side),
        "Call tensor.record_stream",
    ),
    "item": Row(
        lambda patch: patch.setattr(Block, "asks", True), Trains(), "the host waits in aten::_local_scalar_dense"
    ),
    "D1, stream waits": Row(
        lambda patch: patch.setattr(StreamWaits, "first", lambda self: None),
        waits_for_a_slow_rank,
        "told to be outside",
    ),
    "D1, stream waits of messages": Row(
        lambda patch: patch.setattr(Transport, "_arrived", lambda self, buffer, received, waits: received),
        waits_for_a_slow_rank,
        "told to be outside",
    ),
    "D2": Row(
        lambda patch: patch.setattr(Timeouts, "of_operations", timedelta(seconds=SLOW_SECONDS / 4)),
        waits_for_a_slow_rank,
        # Which operation waits longest depends on the machine.
        "ran longer than its timeout of 375 ms|Timed out waiting 375ms",
    ),
    "D3": Row(
        _from_host(lambda tensor, device: tensor.pin_memory().to(device, non_blocking=True)),
        Trains(batches=expanded_batch_of),
        "more than one element of the written-to tensor refers to a single memory location",
    ),
    "D4": Row(_buckets_by_arrival, averages_in_one_order, "in a circle", 4, _small_buckets),
    "D5": Row(_strides_are_dropped, Trains(_transposed), "linear.weight is wrong", always=_over_gloo),
    "D6": Row(
        lambda patch: patch.setattr(Transport, "_sent_memory", lambda self, tensor: tensor),
        Trains(_complex),
        "Unconvertible NCCL type ComplexDouble",
    ),
    "D7": Row(_the_scaler_copies_itself, scales, "the host waits in copy_ from the host"),
    "D8": Row(
        lambda patch: patch.setattr(answered_call, "have_host_copies", lambda traced: False),
        asks_for_masks,
        "the host waits in .*masking_utils",
    ),
    "D9": Row(_largest_of_all, compares_infinities, "the first step differs from the module in one process"),
}


def observed(rank: int, names: list[str], with_defect: bool) -> None:
    """Raise ``AssertionError`` with what is wrong in the programs of these rows."""
    fake_device.install()
    for name in names:
        row = TABLE[name]
        with Patch.context() as patch:
            row.always(cast(Any, patch))
            if with_defect:
                row.defect(patch)
            found = row.program(rank)
        assert not found, f"{name}: {found}"


@pytest.mark.parametrize("name", TABLE)
def test_a_defect_is_found(name: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s){TABLE[name].found}"):
        run_ranks(TABLE[name].ranks, observed, [name], True, timeout=60)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_nothing_is_found_without_a_defect(ranks: int) -> None:
    programs = {(row.program, row.always): name for name, row in TABLE.items() if row.ranks == ranks}
    run_ranks(ranks, observed, list(programs.values()), False, timeout=120)
