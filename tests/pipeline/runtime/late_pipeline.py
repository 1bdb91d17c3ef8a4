"""Steps of a pipeline on late devices: all ranks are threads of one process, with the rules of NCCL."""

import copy
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxdpp.agreement.input_hash import InputHasher, hash_of
from nxdpp.gradients import average, buckets
from nxdpp.pipeline.loss.step_loss import StepLoss
from nxdpp.pipeline.p2p.channel import RemoteChannel
from nxdpp.pipeline.p2p.transport import Transport
from nxdpp.pipeline.partition.assignment import Owners
from nxdpp.pipeline.runtime.engine import Engine
from nxdpp.pipeline.runtime.engine_config import EngineConfig
from nxdpp.pipeline.stages.cut_graph import RankStages
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.schedules.lowering.releases import in_flight_limit, rank_program
from nxdpp.schedules.lowering.transport_rules import GLOO, NCCL, TransportRules
from tests.pipeline.runtime.scheduled_models import Skips, make, rows
from tests.support import late_device
from tests.support.in_process import InProcessPipeline
from tests.support.late_device import DEVICE, SIM, LateCommunicator, LateDevice, LateTensor, LateWork, be_rank, no_waits
from tests.support.plain_models import Block

MICROBATCHES = 4
STEPS = 2
RANKS = 3


class Control:
    """A group for host memory, as ``rank`` calls it."""

    def __init__(self, boxes: dict[Any, queue.Queue[torch.Tensor]], rank: int) -> None:
        self._boxes = boxes
        self.rank = rank

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> "Control":
        """Send."""
        self._box(self.rank, destination, tag).put(tensors[0].clone())
        return self

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> "HostReceive":
        """Start to receive."""
        return HostReceive(tensors[0], self._box(source, self.rank, tag))

    def wait(self) -> None:
        """Return at once: the message has been sent."""

    def _box(self, *key: int) -> queue.Queue[torch.Tensor]:
        # One call: sender and receiver may both be the first. A defaultdict would replace the box of one of them.
        return self._boxes.setdefault(key, queue.Queue())


class HostReceive:
    """A receive into host memory."""

    def __init__(self, buffer: torch.Tensor, box: queue.Queue[torch.Tensor]) -> None:
        self._buffer = buffer
        self._box = box

    def wait(self) -> None:
        """Wait for the message."""
        self._buffer.copy_(self._box.get(timeout=120))


class Groups:
    """The transfer groups of one rank: a communicator for each pair of ranks and way."""

    backend = "nccl"
    has_tags = False
    links: Mapping[int, Any] = {}

    def __init__(self, communicators: Mapping[Any, LateCommunicator], rank: int) -> None:
        self._communicators = communicators
        self._rank = rank

    def between(self, source: int, destination: int) -> tuple[Any, int, int]:
        """Return the communicator of messages in one way."""
        return self._communicators[source, destination].bound(self._rank), source, destination


class HostGroups:
    """The transfer groups of one rank on gloo: messages pass through host memory."""

    backend = "gloo"
    has_tags = True
    links: Mapping[int, Any] = {}

    def __init__(self, group: Control) -> None:
        self._group = group

    def between(self, source: int, destination: int) -> tuple[Any, int, int]:
        """Return the one group."""
        return self._group, source, destination


def compare(rank: int, families: list[str]) -> dict[str, list[str]]:
    """Return, for each case, the schedules that have other numbers on late devices than in one process.

    ``families`` are those of the case without a change. The process has the device type from then on.
    """
    late_device.install()
    dist.get_rank = lambda group: group.rank  # type: ignore[assignment, misc]
    cases = [("", NCCL, families), ("", GLOO, ["1f1b", "zb1p"])]
    cases += [(change, GLOO if change == _ON_GLOO else NCCL, ["gpipe"]) for change in CHANGES]
    found: dict[str, list[str]] = {}
    for change, rules, names in cases:
        with pytest.MonkeyPatch.context() as patch:
            if change:
                CHANGES[change](patch)
            found[f"{rules.name} {change}".strip()] = [name for name in names if not _same(*_train(name, rules))]
    found["average"] = _averages_that_differ(LateWork.wait)
    found["average without a wait"] = _averages_that_differ(lambda self: None)
    found["hashes"] = _hashes_that_differ(LateDevice.to_host)
    found["hashes without a wait"] = _hashes_that_differ(_host_copy_without_a_wait)
    return found


def _host_copy_without_a_wait(self: LateDevice, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    host = torch.full(tensor.size(), -1, dtype=tensor.dtype)
    host.copy_(tensor, non_blocking=True)
    return lambda: host


def _hashes_that_differ(to_host: Callable[[LateDevice, torch.Tensor], Callable[[], torch.Tensor]]) -> list[str]:
    """Return the inputs on a device that have another hash than in host memory; their step waits for nothing."""
    be_rank(0)
    steps = [{"ids": torch.arange(start, start + 6), "mask": torch.arange(7) < start} for start in (1, 2, 3)]
    expected = [[hash_of(step[name]) for name in ("ids", "mask")] for step in steps]
    given = [[{name: value.to(DEVICE) for name, value in step.items()}] for step in steps]
    hasher = InputHasher("first")
    ran: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LateDevice, "to_host", to_host)
        now = hasher.of_step(given[0], is_first=True)
        with no_waits(0):
            assert hasher.of_step(given[1], is_first=False).values == []
        SIM.compute(0).add(lambda: ran.append(True))
        late = hasher.of_step(given[2], is_first=False)
    # The host has waited for the copy of the step before, and not for the work after it.
    assert not ran
    found = zip(
        [*now.names, *late.late_names], [*now.values, *late.late_values], [*expected[0], *expected[1]], strict=True
    )
    return [name for name, value, other in found if value != other]


def _averages_that_differ(wait: Callable[[LateWork], None]) -> list[str]:
    """Return the gradients that the average of two equal replicas changes; hosts do not wait for their devices."""
    be_rank(0)
    values = {"alone": torch.arange(3.0), "first": torch.arange(4.0), "second": torch.ones(2)}
    parameters = {name: nn.Parameter(torch.zeros_like(value).to(DEVICE)) for name, value in values.items()}
    for name, parameter in parameters.items():
        parameter.grad = values[name].to(DEVICE)
    communicator = LateCommunicator()

    def all_reduce(tensor: torch.Tensor, async_op: bool = False, **_: Any) -> LateWork | None:
        assert async_op == (not tensor.is_cpu)
        return communicator.all_reduce(0, tensor) if isinstance(tensor, LateTensor) else None

    with pytest.MonkeyPatch.context() as patch, no_waits(0):
        patch.setattr(LateWork, "wait", wait)
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(dist, "get_world_size", lambda group: 2)
        patch.setattr(dist, "get_backend", lambda group: dist.Backend.NCCL)
        patch.setattr(buckets, "BUCKET_BYTES", 24)
        average.average_gradients(parameters.values(), group=None, control=None)  # type: ignore[arg-type]
    return [name for name, p in parameters.items() if not torch.equal(_gradient(p).cpu(), values[name])]


def _same(ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for of_step in zip(ours, theirs, strict=True) for a, b in zip(*of_step, strict=True))


def _train(name: str, rules: TransportRules) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """Return the losses and gradients of each step in the pipeline, and in one process."""
    schedule = ChosenSchedule(name, RANKS, MICROBATCHES, 1)
    whole = make(Skips, schedule.placement.stages + 1)
    communicators: Any = defaultdict(LateCommunicator)
    boxes: dict[Any, queue.Queue[torch.Tensor]] = {}
    messages: dict[Any, queue.Queue[torch.Tensor]] = {}
    results: list[list[list[torch.Tensor]]] = [[] for _ in range(RANKS)]
    errors: list[BaseException] = []

    # The model is traced before: a trace changes torch for all threads.
    model = copy.deepcopy(whole)
    pipeline = InProcessPipeline(model, schedule.placement.stages, transformer_layer_cls=Block)
    program = pipeline.programs.program(pipeline.programs.cut_graph({"x": rows(2)}, True), "loss")
    owners = pipeline.partition.owners
    ranks = []
    for rank in range(RANKS):
        control = Control(boxes, rank)
        groups = Groups(communicators, rank) if rules == NCCL else HostGroups(Control(messages, rank))
        ranks.append(_Rank(model, owners, program, schedule, rank, rules, groups, control))

    def run(rank: int) -> None:
        try:
            be_rank(rank)
            results[rank] = [ranks[rank].step(step) for step in range(STEPS)]
        except BaseException as error:
            errors.append(error)

    for pair in ((a, b) for a in range(RANKS) for b in range(RANKS)):
        communicators[pair]
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]
    # All steps of all ranks are under way before the first number is read. One thread reads, the last rank first: its
    # device then goes through all steps before another rank reads its messages, on every schedule of the threads.
    found: dict[int, list[list[torch.Tensor]]] = {}
    for rank in reversed(range(RANKS)):
        be_rank(rank)
        found[rank] = [[tensor.cpu() for tensor in of_step] for of_step in results[rank]]
        assert 0 < ranks[rank].busy_share < 1
    in_pipeline = [[tensor for rank in range(RANKS) for tensor in found[rank][step]] for step in range(STEPS)]
    return in_pipeline, [_step_of_one_process(whole, schedule, owners, step) for step in range(STEPS)]


class _Rank:
    """One rank: its stages, and their parameters, on its late device."""

    def __init__(
        self,
        model: nn.Module,
        owners: Owners,
        program: RankStages,
        schedule: ChosenSchedule,
        rank: int,
        rules: TransportRules,
        groups: Any,
        control: Any,
    ) -> None:
        be_rank(rank)
        self._rank = rank
        self._rules = rules
        stages = {stage: program.stages[stage] for stage in schedule.placement.stages_of(rank)}
        self._own = []
        for name, parameter in list(model.named_parameters()):
            if owners[name] & stages.keys():
                self._own.append(nn.Parameter(parameter.detach().to(DEVICE)))
                module, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(module), attribute, self._own[-1])
        actions, releases = rank_program(schedule.training, rank, program.edges, rules, True)
        limit = in_flight_limit(schedule.training, program.edges, rules)
        config = EngineConfig(
            schedule.placement, rank, MICROBATCHES, DEVICE, True, False, limit, in_order=rules == NCCL
        )
        transport = Transport(groups, control, DEVICE)
        self._engine = Engine(config, [stages], transport, actions, releases)

    @property
    def busy_share(self) -> float:
        """Share of the last step in which the rank computed."""
        return self._engine.timer.busy_share

    def step(self, step: int) -> list[torch.Tensor]:
        """Run a step, on NCCL without a wait for the device; its losses, and the gradients of the rank's parameters."""
        inputs = [{"x": part.to(DEVICE)} for part in rows(2 * MICROBATCHES, step).chunk(MICROBATCHES)]
        with no_waits(self._rank) if self._rules == NCCL else nullcontext():
            losses = self._engine.run(StepLoss(inputs))
            results = [loss for (loss,) in losses] + [_gradient(p) for p in self._own]
            for parameter in self._own:
                parameter.grad = None
        return results


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _step_of_one_process(whole: nn.Module, schedule: ChosenSchedule, owners: Owners, step: int) -> list[torch.Tensor]:
    """Losses and gradients, in the order of the ranks."""
    losses = []
    whole.zero_grad()
    for part in rows(2 * MICROBATCHES, step).chunk(MICROBATCHES):
        loss = whole(part)
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    results = []
    for rank in range(RANKS):
        stages = schedule.placement.stages_of(rank)
        results += losses if schedule.placement.stages - 1 in stages else []
        results += [_gradient(p).clone() for name, p in whole.named_parameters() if owners[name] & set(stages)]
    return results


def _no_wait_for_receives(patch: pytest.MonkeyPatch) -> None:
    post_receive, wait = Transport.post_receive, LateWork.wait
    # Ranks are threads: a change of the class for the time of one receive would outlive it where two overlap.
    receives = threading.local()

    def receive(self: Transport, *arguments: Any) -> Callable[[], torch.Tensor]:
        posted = post_receive(self, *arguments)

        def received() -> torch.Tensor:
            receives.is_under_way = True
            try:
                return posted()
            finally:
                receives.is_under_way = False

        return received

    def wait_unless_receiving(self: LateWork) -> None:
        if not getattr(receives, "is_under_way", False):
            wait(self)

    patch.setattr(Transport, "post_receive", receive)
    patch.setattr(LateWork, "wait", wait_unless_receiving)


def _copies_to_the_host_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    def to_host(self: LateDevice, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        host = torch.full(tensor.size(), -1, dtype=tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        return lambda: host

    patch.setattr(LateDevice, "to_host", to_host)


def _memory_of_sends_not_held(patch: pytest.MonkeyPatch) -> None:
    send = Transport.send
    patch.setattr(Transport, "send", lambda self, *arguments: (send(self, *arguments)[0], None))


def _no_wait_for_sends(patch: pytest.MonkeyPatch) -> None:
    def release(self: RemoteChannel, direction: Any, microbatch: int) -> None:
        self._sent.pop((direction, microbatch), None)

    patch.setattr(RemoteChannel, "release", release)


_ON_GLOO = "copies to the host are not waited for"
CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "receives are used before they have come": _no_wait_for_receives,
    "memory of sends is not held": _memory_of_sends_not_held,
    "memory of sends is freed without a wait": _no_wait_for_sends,
    _ON_GLOO: _copies_to_the_host_not_waited_for,
}
"""Lines of the transport, each changed such that it would be wrong on CUDA."""
