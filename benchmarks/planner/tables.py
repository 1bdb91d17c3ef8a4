"""Tables of predicted and measured steps, and the three figures that show whether the planner is right."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.planner.layouts import describe
from benchmarks.planner.measure import Measured
from benchmarks.report import markdown_table
from nxdpp.planning.predict import Prediction

COLUMNS = (
    "tensor x pipeline x data", "step: predicted, ms", "measured, ms", "measured / predicted",
    "peak: predicted, MB", "measured, MB", "measured / predicted, worst rank",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A layout: its prediction and the figures of its ranks."""

    prediction: Prediction
    ranks: Sequence[Measured]

    @property
    def seconds(self) -> float:
        """Step of the slower rank of each step: the lower quartile, which other work on the machine disturbs least."""
        slower: list[float] = sorted(max(step) for step in zip(*(rank.seconds for rank in self.ranks), strict=True))
        return slower[len(slower) // 4]

    @property
    def peak(self) -> float:
        """Most bytes of a rank."""
        return max(rank.peak for rank in self.ranks)

    @property
    def memory_ratio(self) -> float:
        """Measured over predicted bytes of the rank for which they differ most."""
        return max(self._ratios(), key=lambda ratio: abs(ratio - 1))

    def _ratios(self) -> Iterable[float]:
        for stage, predicted in enumerate(self.prediction.memory):
            yield max(rank.peak for rank in self.ranks if rank.stage == stage) / predicted.total


@dataclass(frozen=True)
class Figures:
    """Accuracy over some layouts.

    Attributes:
        layouts: their number.
        correlation: Spearman's rank correlation of predicted and measured steps.
        chosen: measured step of the layout with the least prediction, over the least measured step.
        step: largest difference of measured and predicted steps, as a share.
        memory: largest difference of measured and predicted peaks of a rank, as a share.
    """

    layouts: int
    correlation: float
    chosen: float
    step: float
    memory: float


def figures(rows: Sequence[Row]) -> Figures:
    """Return the accuracy over ``rows``, layouts of the same number of ranks or of several."""
    by_ranks: dict[int, list[Row]] = {}
    for row in rows:
        by_ranks.setdefault(row.prediction.layout.devices, []).append(row)
    chosen = [
        min(of_ranks, key=lambda row: row.prediction.step_seconds).seconds / min(row.seconds for row in of_ranks)
        for of_ranks in by_ranks.values()
    ]
    return Figures(
        len(rows),
        rank_correlation([row.prediction.step_seconds for row in rows], [row.seconds for row in rows]),
        max(chosen),
        max(abs(row.seconds / row.prediction.step_seconds - 1) for row in rows),
        max(abs(row.memory_ratio - 1) for row in rows),
    )


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's correlation; equal numbers share the mean of their ranks."""
    return statistics.correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(each < value for each in values) + (sum(each == value for each in values) + 1) / 2 for value in values]


def rows_table(rows: Sequence[Row]) -> str:
    """Return a row for each layout, the quickest measured first within each number of ranks."""
    ordered = sorted(rows, key=lambda row: (row.prediction.layout.devices, row.seconds))
    return markdown_table(COLUMNS, [_cells(row) for row in ordered], left=COLUMNS[:1])


def figures_table(rows: Sequence[Row]) -> str:
    """Return the accuracy for each number of ranks and for all."""
    groups = {f"{ranks} ranks": [r for r in rows if r.prediction.layout.devices == ranks] for ranks in (2, 4)}
    groups["all"] = list(rows)
    columns = (
        "ranks", "layouts", "rank correlation", "chosen / best", "largest error of a step", "largest error of memory",
    )  # fmt: skip
    cells = []
    for name, of_group in groups.items():
        if len(of_group) > 1:
            each = figures(of_group)
            numbers = (f"{each.correlation:.2f}", f"{each.chosen:.2f}", f"{each.step:.1%}", f"{each.memory:.1%}")
            cells.append([name, str(each.layouts), *numbers])
    return markdown_table(columns, cells, left=columns[:1])


def _cells(row: Row) -> list[str]:
    predicted = row.prediction
    return [
        describe(predicted.layout),
        f"{predicted.step_seconds * 1e3:,.0f}",
        f"{row.seconds * 1e3:,.0f}",
        f"{row.seconds / predicted.step_seconds:.2f}",
        f"{predicted.peak_bytes / 1e6:,.0f}",
        f"{row.peak / 1e6:,.0f}",
        f"{row.memory_ratio:.3f}",
    ]
