"""Contiguous cut whose slowest rank has the least work, with or without a memory limit.

::

    layers   E+1   2   3   4   5   6   7   8   H        E: embedding, H: head and loss
    work      3    2   2   2   2   2   2   2   5
    even    └────────┘ └────┘ └────┘ └─────────┘        5, 4, 4, 9
    best    └────────┘ └────────┘ └────────┘ └─┘        5, 6, 6, 5

The work of a rank is the work of all its stages. By default stage ``s`` is on rank ``s % ranks``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from nxdpp.counted import counted

# With several stages per rank, the search keeps this many partial cuts: the most even ones.
_PARTIAL_CUTS = 500
_GIB = 2**30


@dataclass(frozen=True)
class LayerCost:
    """Cost of a transformer layer with the nodes before it, or of the head.

    ``work`` is of forward and backward of one microbatch, in any unit. ``state_bytes`` are weights, gradients and
    optimizer state, ``activation_bytes`` what one microbatch keeps for its backward.
    """

    layer: str
    work: float
    state_bytes: int = 0
    activation_bytes: int = 0


@dataclass(frozen=True)
class MemoryLimit:
    """Memory of each rank, with the number of microbatches in flight on each stage.

    ``shared_bytes`` are activations of no layer, such as a mask, that each stage keeps of a microbatch.
    ``transport_bytes`` is the part of ``bytes`` that communicators and messages take on each rank.
    """

    bytes: int
    in_flight: Sequence[int]
    shared_bytes: int = 0
    transport_bytes: int = 0


def balanced_cuts(
    layer_costs: Sequence[LayerCost],
    ranks: int,
    chunks: int = 1,
    memory: MemoryLimit | None = None,
    rank_of: Sequence[int] | None = None,
) -> list[str]:
    """Return the names of the layers after which to cut the layers, which are in the order of the model.

    The slowest rank has as little work as possible. Among such cuts the sum of the squares of the ranks' work is the
    smallest. With one chunk per rank the result is exact, in time of ranks times layers squared. With several it is
    exact for up to 500 partial cuts at once. Beyond, the search drops the least even partial cuts. Each rank has
    ``chunks`` stages; ``rank_of`` has the rank of each stage ``s``, by default ``s % ranks``. ``memory=None`` sets no
    limit.

    Raises ``ValueError`` for fewer layers, head included, than stages, or if no cut is found that fits into ``memory``.
    """
    stages = ranks * chunks
    assert memory is None or len(memory.in_flight) == stages
    if len(layer_costs) < stages:
        raise ValueError(
            f"{counted(len(layer_costs), 'transformer layer')} cannot be split over {stages} pipeline stages: each "
            "needs at least one. The modules after the last layer count as one if they have parameters. Use at most "
            f"{counted(len(layer_costs), 'stage')}."
        )
    problem = _Problem(layer_costs, ranks, memory, rank_of or [stage % ranks for stage in range(stages)])
    ends = _cut_exactly(problem) if chunks == 1 else _cut_by_search(problem)
    if ends is None:
        ends = _cheapest(problem, problem.bytes, max)[1] if chunks == 1 else _search(problem, problem.bytes)
        assert ends is not None
        if max(problem.loads(ends, problem.bytes)) > problem.limit:
            raise ValueError(_does_not_fit(problem, chunks, ends))
    return [layer_costs[end - 1].layer for end in ends[:-1]]


# Work or bytes of a stage with the layers from a start up to, without, an end.
_Load = Callable[[int, int, int], float]


class _Problem:
    """Work and bytes of stages and ranks. ``ends`` has the number of layers up to the end of each stage."""

    def __init__(
        self, layer_costs: Sequence[LayerCost], ranks: int, memory: MemoryLimit | None, rank_of: Sequence[int]
    ) -> None:
        assert sorted(set(rank_of)) == list(range(ranks))
        self.layers = len(layer_costs)
        self.ranks = ranks
        self.stages = len(rank_of)
        self.rank_of = rank_of
        self.memory = memory
        self.limit = math.inf if memory is None else memory.bytes - memory.transport_bytes
        self._work = list(accumulate((cost.work for cost in layer_costs), initial=0))
        self._state = list(accumulate((cost.state_bytes for cost in layer_costs), initial=0))
        self._activations = list(accumulate((cost.activation_bytes for cost in layer_costs), initial=0))

    def work(self, stage: int, start: int, end: int) -> float:
        return self._work[end] - self._work[start]

    def bytes(self, stage: int, start: int, end: int) -> int:
        if self.memory is None:
            return 0
        activations = self._activations[end] - self._activations[start] + self.memory.shared_bytes
        return self._state[end] - self._state[start] + self.memory.in_flight[stage] * activations

    def loads(self, ends: Sequence[int], load: _Load) -> list[float]:
        """Return the sum of ``load`` over the stages of each rank."""
        totals = [0.0] * self.ranks
        for stage, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            totals[self.rank_of[stage]] += load(stage, start, end)
        return totals


def _cut_exactly(problem: _Problem) -> list[int] | None:
    """Return the ends of the best cut for one stage per rank, or ``None`` if no cut fits."""

    def work(stage: int, start: int, end: int) -> float:
        fits = problem.bytes(stage, start, end) <= problem.limit
        return problem.work(stage, start, end) if fits else math.inf

    slowest, ends = _cheapest(problem, work, max)
    if slowest == math.inf:
        return None

    def square(stage: int, start: int, end: int) -> float:
        value = work(stage, start, end)
        return value * value if value <= slowest else math.inf

    # Squares of very large work overflow. The first cut is then the result.
    squares, evened = _cheapest(problem, square, lambda a, b: a + b)
    return evened if squares < math.inf else ends


def _cheapest(problem: _Problem, load: _Load, combine: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """Return the least combined load of contiguous stages, infinite if no cut fits, and the end of each stage."""
    layers, stages = problem.layers, problem.stages
    best = [0.0] + [math.inf] * layers
    starts: list[list[int]] = []
    for stage in range(stages):
        loads = [math.inf] * (layers + 1)
        chosen = [0] * (layers + 1)
        for end in range(stage + 1, layers - (stages - stage - 1) + 1):
            for start in range(stage, end):
                if best[start] == math.inf:
                    continue
                candidate = combine(best[start], load(stage, start, end))
                if candidate < loads[end]:
                    loads[end], chosen[end] = candidate, start
        best = loads
        starts.append(chosen)
    ends = [layers]
    for chosen in reversed(starts[1:]):
        ends.append(chosen[ends[-1]])
    return best[layers], ends[::-1]


def _cut_by_search(problem: _Problem) -> list[int] | None:
    """Return the ends of a good cut for several stages per rank, or ``None`` if no cut is found."""
    ends = _search(problem, problem.work)
    if ends is None or max(problem.loads(ends, problem.bytes)) <= problem.limit:
        return ends
    return _search(problem, problem.work, problem.bytes, problem.limit)


# Load and size of each rank so far.
_Loads = tuple[tuple[float, float], ...]


def _search(problem: _Problem, load: _Load, size: _Load = lambda *_: 0.0, limit: float = math.inf) -> list[int] | None:
    """Return the ends of stages whose most loaded rank has little ``load``, with at most ``limit`` of ``size`` a rank.

    The search extends partial cuts stage by stage. A cut that ignores ranks bounds the load.
    """
    _, first = _cheapest(problem, load, max)
    loads = problem.loads(first, load)
    fits = max(problem.loads(first, size)) <= limit
    bound = max(loads) if fits else math.inf
    share = sum(loads) / problem.stages
    partial: dict[tuple[int, _Loads], list[int]] = {(0, ((0.0, 0.0),) * problem.ranks): []}
    for stage in range(problem.stages):
        rank = problem.rank_of[stage]
        last = problem.layers - (problem.stages - stage - 1)
        extended: dict[tuple[int, _Loads], list[int]] = {}
        for (start, so_far), ends in partial.items():
            for end in range(start + 1 if stage < problem.stages - 1 else problem.layers, last + 1):
                own = (so_far[rank][0] + load(stage, start, end), so_far[rank][1] + size(stage, start, end))
                if own[0] > bound or own[1] > limit:
                    break
                extended.setdefault((end, (*so_far[:rank], own, *so_far[rank + 1 :])), [*ends, end])
        due = [share * problem.rank_of[: stage + 1].count(rank) for rank in range(problem.ranks)]
        partial = _most_even(extended, due)
    finished = [([value for value, _ in so_far], ends) for (_, so_far), ends in partial.items()]
    if not finished:
        return first if fits else None
    return min(finished, key=lambda cut: (max(cut[0]), sum(value * value for value in cut[0])))[1]


def _most_even(cuts: dict[tuple[int, _Loads], list[int]], due: list[float]) -> dict[tuple[int, _Loads], list[int]]:
    """Return the partial cuts whose ranks' loads are nearest to ``due``, at most ``_PARTIAL_CUTS``."""
    if len(cuts) <= _PARTIAL_CUTS:
        return cuts

    def distance(cut: tuple[int, _Loads]) -> float:
        return sum((value - wanted) ** 2 for (value, _), wanted in zip(cut[1], due, strict=True))

    return {cut: cuts[cut] for cut in sorted(cuts, key=distance)[:_PARTIAL_CUTS]}


def _does_not_fit(problem: _Problem, chunks: int, ends: list[int]) -> str:
    assert problem.memory is not None
    sizes = problem.loads(ends, problem.bytes)
    rank = sizes.index(max(sizes))
    into = f"over {problem.ranks} stages" if chunks == 1 else f"into {chunks} chunks on each of {problem.ranks} ranks"
    transport = problem.memory.transport_bytes
    communicators = f", {transport / _GIB:.3g} GiB for communicators and messages," if transport else ""
    in_flight = ", ".join(str(problem.memory.in_flight[s]) for s, owner in enumerate(problem.rank_of) if owner == rank)
    return (
        f"no cut {into} fits into the limit of {problem.memory.bytes / _GIB:.3g} GiB per rank: the smallest one needs "
        f"{(sizes[rank] + transport) / _GIB:.3g} GiB on rank {rank}{communicators} for weights, gradients, optimizer "
        f"state and the activations of {in_flight} microbatches in flight. Use more pipeline stages, smaller "
        f"microbatches (a larger num_microbatches), shorter sequences, activation checkpointing, or a higher limit."
    )
