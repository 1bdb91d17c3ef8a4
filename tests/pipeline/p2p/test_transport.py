"""Tensors arrive as they were sent, whatever their strides, dtype and size."""

import torch

from nxdpp import parallel_state
from nxdpp.pipeline.p2p.layout import layout_of
from nxdpp.pipeline.p2p.transport import Direction, Transport
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
]


WAYS = [(direction, upwards) for direction in Direction for upwards in (False, True)]


def make_transport() -> Transport:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    group = parallel_state.get_pipeline_model_parallel_group()
    groups = dict.fromkeys(WAYS, group)
    return Transport(groups, parallel_state.get_pipeline_control_group(), torch.device("cpu"))


def exchange(rank: int) -> None:
    transport = make_transport()
    for direction in Direction:
        if rank == direction:
            sends = [transport.send(tensor, 1 - rank, direction, tag) for tag, tensor in enumerate(TENSORS)]
            for work, _ in sends:
                work.wait()
            continue
        # Posted in another order than sent: tags tell messages apart.
        layouts = [layout_of(tensor).tensors[0] for tensor in TENSORS]
        waits = {
            tag: transport.post_receive(layouts[tag], 1 - rank, direction, tag) for tag in reversed(range(len(TENSORS)))
        }
        for tag, tensor in enumerate(TENSORS):
            received = waits[tag]()
            assert torch.equal(received, tensor)
            assert received.stride() == layouts[tag].stride
            assert received.dtype == tensor.dtype


def test_tensors_arrive_as_they_were() -> None:
    run_ranks(2, exchange)


def describe(rank: int) -> None:
    transport = make_transport()
    description = {"hidden": layout_of((TENSORS[1], None, {"mask": TENSORS[3]}))}
    if rank == 0:
        transport.send_object(description, 1, 0)
        transport.finish()
    else:
        received = transport.receive_object(0, 0)
        assert received == description
        built = received["hidden"].build([TENSORS[1], TENSORS[3]])
        assert built[1] is None
        assert built[2]["mask"] is TENSORS[3]


def test_descriptions_arrive_as_they_were() -> None:
    run_ranks(2, describe)


def send_from_another_device(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    group = parallel_state.get_pipeline_model_parallel_group()
    seen: list[torch.device] = []

    class Recording:
        """Stands for the process group and sees what would reach the wire."""

        def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> object:
            seen.extend(tensor.device for tensor in tensors)
            return group.send(tensors, destination, tag)

        def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> object:
            seen.extend(tensor.device for tensor in tensors)
            return group.recv(tensors, source, tag)

    transport = Transport(dict.fromkeys(WAYS, group), group, torch.device("meta"))
    transport._groups = dict.fromkeys(WAYS, Recording())  # type: ignore[arg-type]
    layout = layout_of(TENSORS[0]).tensors[0]
    if rank == 0:
        work, _ = transport.send(TENSORS[0], 1, Direction.ACTIVATION, 0)
        work.wait()
    else:
        assert transport.post_receive(layout, 0, Direction.ACTIVATION, 0)().device.type == "meta"
    assert seen == [torch.device("cpu")]


def test_gloo_is_only_ever_given_host_memory() -> None:
    run_ranks(2, send_from_another_device)


def cross(rank: int) -> None:
    """What two ranks with several stages each send each other in a first step, received in another order."""
    transport = make_transport()
    layout = layout_of(TENSORS[0]).tensors[0]
    if rank == 0:
        sends = [transport.send(TENSORS[0] + direction, 1, direction, 7) for direction in Direction]
        transport.send_object("description", 1, 7)
        transport.finish()
        for work, _ in sends:
            work.wait()
        return
    assert transport.receive_object(0, 7) == "description"
    waits = {direction: transport.post_receive(layout, 0, direction, 7) for direction in reversed(Direction)}
    for direction, arrived in waits.items():
        assert torch.equal(arrived(), TENSORS[0] + direction)


def test_directions_and_descriptions_do_not_mix_under_one_tag() -> None:
    run_ranks(2, cross)


def note_groups(rank: int) -> list[tuple[Direction, bool, str]]:
    """Which of the four groups the messages of two ranks go through, each way."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    group = parallel_state.get_pipeline_model_parallel_group()
    used: list[tuple[Direction, bool, str]] = []

    class Noting:
        def __init__(self, way: tuple[Direction, bool]) -> None:
            self.way = way

        def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> object:
            used.append((*self.way, "send"))
            return group.send(tensors, destination, tag)

        def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> object:
            used.append((*self.way, "receive"))
            return group.recv(tensors, source, tag)

    transport = Transport(dict.fromkeys(WAYS, group), group, torch.device("cpu"))
    transport._groups = {way: Noting(way) for way in WAYS}  # type: ignore[misc]
    layout = layout_of(TENSORS[0]).tensors[0]
    for direction in Direction:
        arrived = transport.post_receive(layout, 1 - rank, direction, 0)
        work, _ = transport.send(TENSORS[0], 1 - rank, direction, 0)
        arrived()
        work.wait()
    return used


def test_each_kind_of_message_has_a_group_for_each_way() -> None:
    """On NCCL a receive that is posted ahead holds up what is asked of the same group after it."""
    lower, higher = run_ranks(2, note_groups)
    for direction in Direction:
        assert (direction, True, "send") in lower
        assert (direction, False, "receive") in lower
        assert (direction, False, "send") in higher
        assert (direction, True, "receive") in higher
