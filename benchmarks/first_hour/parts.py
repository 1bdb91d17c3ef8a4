"""The parts of the first hour, each with its limit."""

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.first_hour import faults, one, schedules, speed, units
from benchmarks.first_hour.place import CPU, FAKE, ONE_CHIP, OWN, SHARED, Place
from benchmarks.first_hour.start import Start
from nxdpp.devices import CUDA

MOST_RANKS = 8


class Part(NamedTuple):
    """A part.

    Attributes:
        text: what it does.
        limit: seconds after which it ends, whatever its cases do.
        starts: the ranks that it starts at a place; none where the part is not for the device.
    """

    text: str
    limit: int
    starts: Callable[[Place], list[Start]]


def _one(place: Place) -> list[Start]:
    return [Start(one.__name__, one.CASES, 120.0)]


def _schedules(place: Place) -> list[Start]:
    ranks = 2 if place.dry else 4
    return [Start(schedules.__name__, schedules.cases(ranks), 120.0, ranks, SHARED)]


def _several(place: Place) -> list[Start]:
    def start(ranks: int, way: str, label: str = "", **variables: str) -> Start:
        # The dry run of `schedules` has the others.
        cases = ["1f1b", "zb-v"] if place.dry else schedules.cases(ranks)
        return Start(schedules.__name__, cases, 60.0, ranks, way, variables, f"{ranks} ranks{label}, ")

    if place.device == CPU:
        # `schedules` has the same ranks there.
        return []
    if place.has_own(2):
        return [start(2 if place.dry else min(MOST_RANKS, place.visible), OWN)]
    late = {"CUDA_LAUNCH_BLOCKING": "1"}
    blocking = [start(2, ONE_CHIP, ", launches block", **late)] if place.device == CUDA else []
    return [start(2, ONE_CHIP), start(4, ONE_CHIP), *blocking]


def _sanitizer(place: Place) -> list[Start]:
    if place.device != CUDA:
        return []
    variables = {"TORCH_CUDA_SANITIZER": "1"}
    return [
        Start(one.__name__, one.WITH_SEVERAL_STREAMS, 90.0, environment=variables, label="one rank, "),
        Start(schedules.__name__, ["1f1b", "zb-v"], 90.0, 2, SHARED, variables, "2 ranks, "),
    ]


def _faults(place: Place) -> list[Start]:
    def start(way: str, label: str) -> Start:
        return Start(faults.__name__, faults.CASES, 60.0, 2, way, label=label, judge=faults.judge)

    if place.has_own(2):
        return [start(OWN, "")]
    return [start(SHARED, "over gloo, "), start(ONE_CHIP, f"over {place.backend}, ")]


def _speed(place: Place) -> list[Start]:
    # The layers divide into a power of two.
    ranks = 2 if place.device in (CPU, FAKE) else 1 << min(MOST_RANKS, place.visible).bit_length() - 1
    return [Start(speed.__name__, speed.CASES, 400.0, ranks)]


PARTS = {
    "units": Part("copies while the device is busy, random state", 120, lambda place: [
        Start(units.__name__, units.cases(place), 30.0)
    ]),
    "one": Part("one rank next to plain torch: autocast, shards, checkpoints and more; waits of the host", 600, _one),
    "schedules": Part("every schedule next to one process; the ranks share a device, over gloo", 600, _schedules),
    "several": Part("every schedule, a device for each rank; with one device an experiment", 500, _several),
    "sanitizer": Part("torch's CUDA sanitizer: races between streams", 400, _sanitizer),
    "faults": Part("a stuck layer and a kill: which rank is named, and when all have ended", 240, _faults),
    "speed": Part("step time and memory next to torch.distributed.pipelining and FSDP2", 900, _speed),
}  # fmt: skip
