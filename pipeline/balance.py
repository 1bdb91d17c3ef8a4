"""The contiguous cut that makes the slowest stage as fast as it can be, under a limit of memory if there is one.

::

    layers   E+1   2   3   4   5   6   7   8+H        E: embedding, H: head and loss
    work      3    2   2   2   2   2   2    7
    even    └────────┘ └────┘ └────┘ └────────┘       5, 4, 4, 9
    best    └────────────┘ └────┘ └────┘ └──┘         7, 4, 4, 7

With several chunks a rank, chunk ``c`` is on rank ``c % ranks``, and a rank's work is that of all its chunks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

# So many partial cuts are followed at once where ranks have several chunks; beyond, the most even ones.
_OPEN_CUTS = 500
_GIB = 2**30


@dataclass(frozen=True)
class LayerCost:
    """What one transformer layer costs, with what runs before it and, for the last one, after it.

    ``work`` is forward and backward of one microbatch, in any unit; ``state_bytes`` are weights, gradients and
    optimizer state; ``activation_bytes`` what the forward of one microbatch keeps for its backward.
    """

    layer: str
    work: float
    state_bytes: int = 0
    activation_bytes: int = 0


@dataclass(frozen=True)
class MemoryLimit:
    """The bytes that each rank has.

    Rank ``r`` keeps activations of ``in_flight[r]`` microbatches at once; ``shared_bytes`` of them, beside the
    layers' own, are kept by each rank (a mask).
    """

    bytes: int
    in_flight: Sequence[int]
    shared_bytes: int = 0


def in_flight_1f1b(stages: int, microbatches: int) -> list[int]:
    """How many microbatches each stage keeps activations of under 1F1B."""
    return [min(stages - stage, microbatches) for stage in range(stages)]


def balanced_cuts(
    costs: Sequence[LayerCost], ranks: int, chunks: int = 1, memory: MemoryLimit | None = None
) -> list[str]:
    """The layers after which to cut for ``chunks`` contiguous chunks on each of ``ranks``.

    The slowest rank has as little work as possible; among such cuts the sum of the squares of the ranks' work is
    the smallest. One chunk a rank: exact, in ranks times layers squared. Several: exact as long as at most 500
    partial cuts are open at once, else the best of the most even ones.

    Raises ``ValueError`` where there are fewer layers than chunks, and where no cut fits into ``memory``.
    """
    assert memory is None or len(memory.in_flight) == ranks
    if len(costs) < ranks * chunks:
        raise ValueError(
            f"{len(costs)} transformer layers cannot be split over {ranks * chunks} pipeline stages: each needs at "
            f"least one. Use at most {len(costs)} stages."
        )
    problem = _Problem(costs, ranks, memory)
    ends = _cut_stages(problem) if chunks == 1 else _cut_chunks(problem, chunks)
    if ends is None:
        raise ValueError(_does_not_fit(problem, chunks))
    return [costs[end - 1].layer for end in ends[:-1]]


class _Problem:
    """Work and bytes of runs of layers, each run given by its first layer and the one after its last."""

    def __init__(self, costs: Sequence[LayerCost], ranks: int, memory: MemoryLimit | None) -> None:
        self.layers = len(costs)
        self.ranks = ranks
        self.memory = memory
        self._work = list(accumulate((cost.work for cost in costs), initial=0))
        self._state = list(accumulate((cost.state_bytes for cost in costs), initial=0))
        self._activations = list(accumulate((cost.activation_bytes for cost in costs), initial=0))

    def work(self, start: int, end: int) -> float:
        """Work of the layers from ``start`` up to, without, ``end``."""
        return self._work[end] - self._work[start]

    def bytes(self, rank: int, start: int, end: int) -> int:
        """Bytes of these layers on ``rank``, without what all ranks keep."""
        if self.memory is None:
            return 0
        activations = self._activations[end] - self._activations[start]
        return self._state[end] - self._state[start] + self.memory.in_flight[rank] * activations

    def room(self, rank: int) -> float:
        """Bytes for layers on ``rank``."""
        if self.memory is None:
            return math.inf
        return self.memory.bytes - self.memory.in_flight[rank] * self.memory.shared_bytes


def _cut_stages(problem: _Problem) -> list[int] | None:
    def work(rank: int, start: int, end: int) -> float:
        fits = problem.bytes(rank, start, end) <= problem.room(rank)
        return problem.work(start, end) if fits else math.inf

    slowest, ends = _cheapest(problem.layers, problem.ranks, work, max)
    if slowest == math.inf:
        return None

    def square(rank: int, start: int, end: int) -> float:
        run = work(rank, start, end)
        return run * run if run <= slowest else math.inf

    # Rounded sums of squares can do without this cut, never with more than the slowest stage.
    squares, evened = _cheapest(problem.layers, problem.ranks, square, lambda a, b: a + b)
    return evened if squares < math.inf else ends


def _cheapest(
    layers: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The least combined cost of ``stages`` runs, and where each ends; infinite where there is none."""
    best = [0.0] + [math.inf] * layers
    starts: list[list[int]] = []
    for stage in range(stages):
        costs = [math.inf] * (layers + 1)
        chosen = [0] * (layers + 1)
        for end in range(stage + 1, layers - (stages - stage - 1) + 1):
            for start in range(stage, end):
                if best[start] == math.inf:
                    continue
                candidate = combine(best[start], cost(stage, start, end))
                if candidate < costs[end]:
                    costs[end], chosen[end] = candidate, start
        best = costs
        starts.append(chosen)
    ends = [layers]
    for chosen in reversed(starts[1:]):
        ends.append(chosen[ends[-1]])
    return best[layers], ends[::-1]


# Work and bytes of each rank so far.
_Loads = tuple[tuple[float, int], ...]


def _cut_chunks(problem: _Problem, chunks: int) -> list[int] | None:
    total = problem.ranks * chunks
    bound = _slowest_of_even_chunks(problem, total)
    open_cuts: dict[tuple[int, _Loads], list[int]] = {(0, ((0.0, 0),) * problem.ranks): []}
    for chunk in range(total):
        rank = chunk % problem.ranks
        last = problem.layers - (total - chunk - 1)
        grown: dict[tuple[int, _Loads], list[int]] = {}
        for (start, loads), ends in open_cuts.items():
            for end in range(start + 1 if chunk < total - 1 else problem.layers, last + 1):
                work, size = loads[rank]
                load = (work + problem.work(start, end), size + problem.bytes(rank, start, end))
                if load[0] > bound or load[1] > problem.room(rank):
                    break
                grown.setdefault((end, (*loads[:rank], load, *loads[rank + 1 :])), [*ends, end])
        open_cuts = _most_even(grown, problem, chunk + 1, chunks)
    finished = [([work for work, _ in loads], ends) for (_, loads), ends in open_cuts.items()]
    if not finished:
        return None
    return min(finished, key=lambda cut: (max(cut[0]), sum(work * work for work in cut[0])))[1]


def _slowest_of_even_chunks(problem: _Problem, total: int) -> float:
    """The slowest rank of one good cut, a bound on that of the best; infinite where memory says more than work."""
    if problem.memory is not None:
        return math.inf
    _, ends = _cheapest(problem.layers, total, lambda _, start, end: problem.work(start, end), max)
    work = [0.0] * problem.ranks
    for chunk, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        work[chunk % problem.ranks] += problem.work(start, end)
    return max(work)


def _most_even(
    cuts: dict[tuple[int, _Loads], list[int]], problem: _Problem, made: int, chunks: int
) -> dict[tuple[int, _Loads], list[int]]:
    """The open cuts themselves, or as many as are followed: those whose ranks are nearest to an even share."""
    if len(cuts) <= _OPEN_CUTS:
        return cuts
    share = problem.work(0, problem.layers) / (problem.ranks * chunks)
    due = [share * (made // problem.ranks + (rank < made % problem.ranks)) for rank in range(problem.ranks)]

    def distance(cut: tuple[int, _Loads]) -> float:
        return sum((work - wanted) ** 2 for (work, _), wanted in zip(cut[1], due, strict=True))

    return {cut: cuts[cut] for cut in sorted(cuts, key=distance)[:_OPEN_CUTS]}


def _does_not_fit(problem: _Problem, chunks: int) -> str:
    memory = problem.memory
    assert memory is not None
    remedy = (
        "Use more pipeline stages, smaller microbatches (a larger num_microbatches), shorter sequences, activation "
        "checkpointing, or a higher limit."
    )
    limit = f"the limit of {memory.bytes / _GIB:.2f} GiB a rank"
    if chunks > 1:
        return f"no cut into {chunks} chunks on each of {problem.ranks} ranks was found within {limit}. {remedy}"

    def total(rank: int, start: int, end: int) -> float:
        return problem.bytes(rank, start, end) + memory.in_flight[rank] * memory.shared_bytes

    needed, ends = _cheapest(problem.layers, problem.ranks, total, max)
    starts = [0, *ends[:-1]]
    sizes = [total(rank, start, end) for rank, (start, end) in enumerate(zip(starts, ends, strict=True))]
    return (
        f"no cut of {problem.layers} layers over {problem.ranks} stages fits into {limit}: the thriftiest needs "
        f"{needed / _GIB:.2f} GiB on stage {sizes.index(needed)} for weights, gradients, optimizer state and the "
        f"activations of {memory.in_flight[sizes.index(needed)]} microbatches in flight. {remedy}"
    )
