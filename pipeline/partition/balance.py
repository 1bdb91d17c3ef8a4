"""The contiguous cut that makes the slowest stage as fast as it can be, under a limit of memory if there is one.

::

    layers   E+1   2   3   4   5   6   7   8   H        E: embedding, H: head and loss
    work      3    2   2   2   2   2   2   2   5
    even    └────────┘ └────┘ └────┘ └─────────┘        5, 4, 4, 9
    best    └────────┘ └────────┘ └────────┘ └─┘        5, 6, 6, 5

With several chunks a rank, a rank's work is that of all its chunks. By default chunk ``c`` is on rank ``c % ranks``.
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
    """What one transformer layer costs, with what runs before it; or what follows the last one, as if a layer.

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

    Chunk ``c`` keeps activations of ``in_flight[c]`` microbatches at once; ``shared_bytes`` of them, beside the
    layers' own, are kept by each chunk (a mask).
    """

    bytes: int
    in_flight: Sequence[int]
    shared_bytes: int = 0


def balanced_cuts(
    costs: Sequence[LayerCost],
    ranks: int,
    chunks: int = 1,
    memory: MemoryLimit | None = None,
    rank_of: Sequence[int] | None = None,
) -> list[str]:
    """The layers after which to cut for ``chunks`` contiguous chunks on each of ``ranks``.

    ``rank_of`` gives the rank of each chunk, in the order of the model; by default they are dealt out in turn.
    The slowest rank has as little work as possible; among such cuts the sum of the squares of the ranks' work is
    the smallest. One chunk a rank: exact, in ranks times layers squared. Several: exact as long as at most 500
    partial cuts are open at once, else the best of the most even ones.

    Raises ``ValueError`` where there are fewer layers (and what follows them) than chunks, and where no cut was found
    that fits into ``memory``, with the bytes of the thriftiest.
    """
    assert memory is None or len(memory.in_flight) == ranks * chunks
    if len(costs) < ranks * chunks:
        raise ValueError(
            f"{len(costs)} transformer layers cannot be split over {ranks * chunks} pipeline stages: each needs at "
            f"least one (what follows the last one counts as one, if it has parameters). Use at most {len(costs)} "
            f"stages."
        )
    problem = _Problem(costs, ranks, memory, rank_of or [chunk % ranks for chunk in range(ranks * chunks)])
    ends = _cut_stages(problem) if chunks == 1 else _cut_chunks(problem, chunks)
    if ends is None and memory is not None:
        ends = _thriftiest(problem, chunks)
        if max(problem.sizes(ends)) > memory.bytes:
            raise ValueError(_does_not_fit(problem, chunks, ends))
    assert ends is not None
    return [costs[end - 1].layer for end in ends[:-1]]


class _Problem:
    """Work and bytes of runs of layers, each run given by its first layer and the one after its last."""

    def __init__(
        self, costs: Sequence[LayerCost], ranks: int, memory: MemoryLimit | None, rank_of: Sequence[int]
    ) -> None:
        assert sorted(set(rank_of)) == list(range(ranks))
        self.layers = len(costs)
        self.ranks = ranks
        self.memory = memory
        self.rank_of = rank_of
        self._work = list(accumulate((cost.work for cost in costs), initial=0))
        self._state = list(accumulate((cost.state_bytes for cost in costs), initial=0))
        self._activations = list(accumulate((cost.activation_bytes for cost in costs), initial=0))

    def work(self, start: int, end: int) -> float:
        """Work of the layers from ``start`` up to, without, ``end``."""
        return self._work[end] - self._work[start]

    def bytes(self, chunk: int, start: int, end: int) -> int:
        """Bytes of ``chunk`` if it is these layers."""
        if self.memory is None:
            return 0
        activations = self._activations[end] - self._activations[start] + self.memory.shared_bytes
        return self._state[end] - self._state[start] + self.memory.in_flight[chunk] * activations

    def room(self) -> float:
        """Bytes of a rank."""
        return math.inf if self.memory is None else self.memory.bytes

    def sizes(self, ends: Sequence[int]) -> list[float]:
        """Bytes of each rank for chunks with these ends."""
        return self.loads(ends, self.bytes)

    def loads(self, ends: Sequence[int], load: "_Load") -> list[float]:
        """Each rank's sum over its chunks with these ends."""
        totals = [0.0] * self.ranks
        for chunk, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            totals[self.rank_of[chunk]] += load(chunk, start, end)
        return totals


# What a chunk weighs, given by its number, its first layer and the one after its last.
_Load = Callable[[int, int, int], float]


def _cut_stages(problem: _Problem) -> list[int] | None:
    def work(rank: int, start: int, end: int) -> float:
        fits = problem.bytes(rank, start, end) <= problem.room()
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
    cost: _Load,
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
_Loads = tuple[tuple[float, float], ...]


def _cut_chunks(problem: _Problem, chunks: int) -> list[int] | None:
    def work(_: int, start: int, end: int) -> float:
        return problem.work(start, end)

    ends = _search(problem, chunks, work, lambda *_: 0.0, math.inf)
    if ends is None or problem.memory is None or max(problem.sizes(ends)) <= problem.memory.bytes:
        return ends
    return _search(problem, chunks, work, problem.bytes, problem.room())


def _thriftiest(problem: _Problem, chunks: int) -> list[int]:
    """Where the chunks end if the rank that needs the most bytes is to need as few as possible."""
    if chunks == 1:
        return _cheapest(problem.layers, problem.ranks, problem.bytes, max)[1]
    ends = _search(problem, chunks, problem.bytes, lambda *_: 0.0, math.inf)
    assert ends is not None
    return ends


def _search(problem: _Problem, chunks: int, load: _Load, size: _Load, room: float) -> list[int] | None:
    """Where chunks end so that the rank of the most ``load`` has little, and none more ``size`` than there is room."""
    total = problem.ranks * chunks
    _, one_good = _cheapest(problem.layers, total, load, max)
    loads = problem.loads(one_good, load)
    fits = max(problem.loads(one_good, size)) <= room
    bound = max(loads) if fits else math.inf
    share = sum(loads) / total
    open_cuts: dict[tuple[int, _Loads], list[int]] = {(0, ((0.0, 0.0),) * problem.ranks): []}
    for chunk in range(total):
        rank = problem.rank_of[chunk]
        last = problem.layers - (total - chunk - 1)
        grown: dict[tuple[int, _Loads], list[int]] = {}
        for (start, so_far), ends in open_cuts.items():
            for end in range(start + 1 if chunk < total - 1 else problem.layers, last + 1):
                own = (so_far[rank][0] + load(chunk, start, end), so_far[rank][1] + size(chunk, start, end))
                if own[0] > bound or own[1] > room:
                    break
                grown.setdefault((end, (*so_far[:rank], own, *so_far[rank + 1 :])), [*ends, end])
        open_cuts = _most_even(
            grown, [share * problem.rank_of[: chunk + 1].count(rank) for rank in range(problem.ranks)]
        )
    finished = [([value for value, _ in so_far], ends) for (_, so_far), ends in open_cuts.items()]
    if not finished:
        return one_good if fits else None
    return min(finished, key=lambda cut: (max(cut[0]), sum(value * value for value in cut[0])))[1]


def _most_even(cuts: dict[tuple[int, _Loads], list[int]], due: list[float]) -> dict[tuple[int, _Loads], list[int]]:
    """The open cuts themselves, or as many as are followed: those whose ranks are nearest to what is ``due``."""
    if len(cuts) <= _OPEN_CUTS:
        return cuts

    def distance(cut: tuple[int, _Loads]) -> float:
        return sum((value - wanted) ** 2 for (value, _), wanted in zip(cut[1], due, strict=True))

    return {cut: cuts[cut] for cut in sorted(cuts, key=distance)[:_OPEN_CUTS]}


def _does_not_fit(problem: _Problem, chunks: int, ends: list[int]) -> str:
    assert problem.memory is not None
    sizes = problem.sizes(ends)
    rank = sizes.index(max(sizes))
    into = f"over {problem.ranks} stages" if chunks == 1 else f"into {chunks} chunks on each of {problem.ranks} ranks"
    in_flight = ", ".join(str(problem.memory.in_flight[c]) for c, of in enumerate(problem.rank_of) if of == rank)
    return (
        f"no cut {into} fits into the limit of {problem.memory.bytes / _GIB:.3g} GiB a "
        f"rank: the thriftiest needs {sizes[rank] / _GIB:.3g} GiB on stage {rank} for weights, gradients, optimizer "
        f"state and the activations of {in_flight} microbatches in flight. Use more pipeline stages, smaller "
        f"microbatches (a larger num_microbatches), shorter sequences, activation checkpointing, or a higher limit."
    )
