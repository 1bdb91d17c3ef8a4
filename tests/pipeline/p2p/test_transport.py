"""Received tensors equal the sent ones, for any strides, dtype and size; marks are told from all gradients."""

import os
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from nxdpp import parallel_state
from nxdpp.pipeline.p2p import transport as transport_module
from nxdpp.pipeline.p2p.layout import layout_of
from nxdpp.pipeline.p2p.transport import Direction, Transport, are_zeros, is_mark, mark_like, zeros_like
from nxdpp.ranks import host_link
from nxdpp.ranks.transfer_groups import TransferGroups
from tests.support.run_ranks import run_ranks

TENSORS = [
    torch.arange(24.0).view(2, 3, 4),
    torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
    torch.arange(6, dtype=torch.int64),
    torch.tensor([True, False]),
    torch.arange(5.0).to(torch.bfloat16),
    torch.tensor(3.5),
    torch.empty(0, 3),
    torch.arange(4.0).to(torch.complex64),
    torch.arange(5000.0),
    torch.arange(2),
    # Lazy values, which are not in the memory.
    torch.complex(torch.arange(4.0), torch.ones(4)).conj(),
    torch._neg_view(torch.arange(24.0).view(2, 3, 4).transpose(0, 2)),
    torch._efficientzerotensor(4),
]


class OneGroup:
    """A single group for all transfers."""

    backend = "gloo"
    has_tags = True
    links: dict[int, Any] = {}

    def __init__(self, group: Any) -> None:
        self._group = group

    def between(self, source: int, destination: int) -> tuple[Any, int, int]:
        return self._group, source, destination


def make_transport() -> Transport:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    groups = parallel_state.get_pipeline_transfer_groups()
    return Transport(groups, parallel_state.get_pipeline_control_group(), torch.device("cpu"))


def exchange(rank: int) -> None:
    """Over shared memory, over gloo, and over both: a message without a slot goes over gloo, as does a large one."""
    for choice, largest_slot, largest in (
        ("shm", 2**20, 2**20),
        ("gloo", 0, 0),
        ("shm", 4096, 2**20),
        ("shm", 0, 4096),
    ):
        os.environ["NXDPP_P2P"] = choice
        host_link.LARGEST_SLOT = largest_slot or host_link.LARGEST_SLOT
        transport_module.LARGEST_SLOT = largest  # type: ignore[attr-defined]  # what it has imported
        transport = make_transport()
        assert len(parallel_state.get_pipeline_transfer_groups().links) == (choice == "shm")
        for direction in Direction:
            _exchange(transport, rank, direction)
        _exchange_with_one_tag(transport, rank)
        parallel_state.destroy_model_parallel()


def _exchange(transport: Transport, rank: int, direction: Direction) -> None:
    if rank == direction:
        sends = [transport.send(tensor, 1 - rank, direction, tag) for tag, tensor in enumerate(TENSORS)]
        for work, _ in sends:
            work.wait()
        return
    # Posted in another order than sent: messages are matched by their tags.
    layouts = [layout_of(tensor).tensors[0] for tensor in TENSORS]
    waits = {
        tag: transport.post_receive(layouts[tag], 1 - rank, direction, tag) for tag in reversed(range(len(TENSORS)))
    }
    for tag, tensor in enumerate(TENSORS):
        received = waits[tag]()
        assert torch.equal(received, tensor.clone().resolve_conj().resolve_neg())
        assert received.stride() == layouts[tag].stride
        assert received.dtype == tensor.dtype


def _exchange_with_one_tag(transport: Transport, rank: int) -> None:
    """Messages of one tag, by different means where the larger one has no slot."""
    tensors = [TENSORS[8] + number if number % 2 else TENSORS[0] + number for number in range(4)]
    if rank == 0:
        for work, _ in [transport.send(tensor, 1, Direction.ACTIVATION, 3) for tensor in tensors]:
            work.wait()
        return
    for tensor in tensors:
        received = transport.post_receive(layout_of(tensor).tensors[0], 0, Direction.ACTIVATION, 3)()
        assert torch.equal(received, tensor)


_OF_NCCL = {torch.uint8, torch.int8, torch.bool, torch.int32, torch.int64, *(t.dtype for t in TENSORS)} - {
    torch.complex64
}


def exchange_as_on_nccl(rank: int) -> None:
    """Exchange tensors of all dtypes over a group that takes those of NCCL alone."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    group = parallel_state.get_pipeline_control_group()

    class Checked:
        """The group, which notes dtypes; messages are matched by their order."""

        def send(self, messages: Any, *numbers: int) -> Any:
            assert messages[0].dtype in _OF_NCCL
            return group.send(messages, *numbers)

        def recv(self, messages: Any, *numbers: int) -> Any:
            assert messages[0].dtype in _OF_NCCL
            return group.recv(messages, *numbers)

    groups = OneGroup(Checked())
    groups.backend, groups.has_tags = "nccl", False
    transport = Transport(cast(TransferGroups, groups), group, torch.device("cpu"))
    numbers = torch.arange(24).view(2, 3, 4).transpose(0, 2)
    dtypes = (torch.complex64, torch.complex128, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float32)
    for dtype in dtypes:
        for tensor in (numbers.to(dtype), numbers.to(dtype)[0, 0, 0], numbers.to(dtype)[:0]):
            layout = layout_of(tensor).tensors[0]
            if rank == 0:
                transport.send(tensor, 1, Direction.ACTIVATION, 0)[0].wait()
                continue
            received = transport.post_receive(layout, 0, Direction.ACTIVATION, 0)()
            assert (received.dtype, received.stride(), received.tolist()) == (dtype, layout.stride, tensor.tolist())


def exchange_through_host(rank: int) -> None:
    """Both ranks send from the thread of another device's sends, while the main thread receives."""

    class Host:
        @staticmethod
        def to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
            assert not tensor.is_neg()
            return lambda: torch.full(tensor.shape, float(len(tensor)))

        @staticmethod
        def from_host(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

    transport_module.device_of = lambda device: Host  # type: ignore[attr-defined, assignment, return-value]
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    groups = parallel_state.get_pipeline_transfer_groups()
    assert groups.links
    control = parallel_state.get_pipeline_control_group()
    transport = Transport(groups, control, torch.device("meta"))
    rows = range(1, 65)
    tensors = {n: torch._neg_view(torch.empty(n, 300, device="meta")) for n in rows}
    sends = [transport.send(tensors[n], 1 - rank, Direction.ACTIVATION, n) for n in rows]
    for n in reversed(rows):
        (layout,) = layout_of(torch.empty(n, 300)).tensors
        received = transport.post_receive(layout, 1 - rank, Direction.ACTIVATION, n)()
        assert torch.equal(received, torch.full((n, 300), float(n)))
    for work, _ in sends:
        work.wait()


@pytest.mark.cpu_only("it is about messages of gloo and of shared memory")
def test_received_tensors_equal_the_sent_ones() -> None:
    run_ranks(2, exchange)
    run_ranks(2, exchange_through_host)


def test_dtypes_that_nccl_does_not_have_are_sent_as_bytes() -> None:
    run_ranks(2, exchange_as_on_nccl)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_a_mark_is_seen_and_no_other_value_is_one(dtype: torch.dtype) -> None:
    for shape in ((), (1,), (2, 3, 4)):
        like = torch.ones(shape, dtype=dtype)
        mark = mark_like(like)
        assert (mark.dtype, mark.shape) == (dtype, shape)
        assert is_mark(mark)
        assert torch.isnan(mark).all()
        for value in (0.0, 1.0, float("nan"), float("inf")):
            other = like * value
            assert not any(map(is_mark, (other, -other, other - other)))


def test_zeros_change_no_sum() -> None:
    values = torch.tensor([0.0, -0.0, 3.0])

    assert are_zeros(zeros_like(values))
    assert torch.equal((values + zeros_like(values)).signbit(), values.signbit())
    assert not are_zeros(values)
