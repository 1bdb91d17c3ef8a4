"""Order in which the gradients of a rank are averaged during the last backwards of a step."""

import zlib
from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

from torch import nn

from nxdpp.gradients.buckets import cut
from nxdpp.gradients.expert_parameters import is_of_experts

NO_STAGE = -1


class LastBackward(NamedTuple):
    """The last action of ``stage`` in a rank's step that adds to the gradients of ``parameters``."""

    stage: int
    parameters: Sequence[nn.Parameter]


class AveragePlan:
    """The order of the buckets for some parameters and last backwards.

    They go by the order of the last backwards, in each against the order of the parameters. ``stage_of`` has the stage
    of each parameter's last backward, by id; ``order`` is a hash of the buckets and of the order of all trained
    parameters, equal on equal replicas.
    """

    def __init__(
        self, trained: list[nn.Parameter], last: Sequence[LastBackward], held_back: set[int], expected: set[int]
    ) -> None:
        self.trained, self.last, self.held_back, self.expected = trained, last, held_back, expected
        self.stage_of = {id(p): stage for stage, parameters in last for p in parameters if id(p) not in held_back}
        number = {stage: place for place, (stage, _) in enumerate(last)}
        places: list[list[nn.Parameter]] = [[] for _ in range(len(last) + 1)]
        for parameter in trained:
            places[number.get(self.stage_of.get(id(parameter), NO_STAGE), -1)].append(parameter)
        # Parameters that are held back wait for no others, and no others wait for them.
        parts = [[parameter for place in places[:-1] for parameter in reversed(place)], places[-1]]
        chosen = [[each for each in part if id(each) in expected] for part in parts]
        self.buckets = [bucket for part in chosen for bucket in cut(part, kind_of=is_of_experts)]
        index = {id(parameter): place for place, parameter in enumerate(trained)}
        text = [[(index[id(p)], p.numel(), str(p.dtype)) for p in bucket] for bucket in self.buckets]
        every = [index[id(p)] for part in parts for p in part]
        self.order = zlib.crc32(repr((every, text)).encode())

    def is_for(
        self, trained: list[nn.Parameter], last: Sequence[LastBackward], held_back: set[int], expected: set[int]
    ) -> bool:
        """Return whether this is the plan of a step with these."""
        same = last is self.last and len(trained) == len(self.trained)
        return (
            same and all(map(is_, trained, self.trained)) and (held_back, expected) == (self.held_back, self.expected)
        )
