"""Markdown tables of bytes, memory, the hidden share of the average, and times next to torch."""

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.layouts.contenders import Timed
from benchmarks.layouts.hidden import Case, Steps, summary
from benchmarks.layouts.job import Layout, Shape, least_bytes, plan
from benchmarks.layouts.step import DIMENSIONS, Measured
from benchmarks.report import markdown_table
from nxdpp.planning.predict import Prediction
from nxdpp.planning.rank_memory import RankMemory

LAYOUT = "tensor x pipeline x data"
BYTES = (
    LAYOUT, "stage", "tensor: least, plan, sent", "collectives", "pipeline: least, sent", "data: least, sent",
)  # fmt: skip
MEMORY = (
    LAYOUT, "stage", "parameters: plan, kept", "optimizer: plan, kept", "gradients: plan, kept",
    "activations: plan, measured", "optimizer's step", "peak: plan, measured", "measured / plan",
)  # fmt: skip
AVERAGE = (
    "model", "pipeline x data", "contender", "gradients, MiB", "average at the end, ms", "overlapped, ms",
    "average alone, ms", "its processor time", "hidden share (quartiles)", "waited for after the backward, ms",
)  # fmt: skip
TIMES = (
    "dimension", "torch's own", "its step, ms", "nxdpp, ms", "nxdpp / torch (quartiles)", "its sent KB a step",
    "nxdpp's",
)  # fmt: skip

Row = Sequence[str]


def bytes_row(layout: Layout, shape: Shape, stage: int, planned: Prediction, measured: Measured) -> Row:
    """Return the row of a rank's sent bytes, in KB."""
    least = least_bytes(layout, shape, planned, stage)
    assert not measured.sent["other"], "groups of no dimension send no numbers"
    return [
        str(layout),
        str(stage),
        f"{_kb(least['tensor'])}, {_kb(planned.sent[stage].tensor)}, {_kb(measured.sent['tensor'])}",
        f"{measured.messages.get('tensor', 0)}",
        *(f"{_kb(least[dimension])}, {_kb(measured.sent[dimension])}" for dimension in DIMENSIONS[:2]),
    ]


def memory_row(layout: Layout, stage: int, memory: RankMemory, measured: Measured) -> Row:
    """Return the row of a rank's memory, in KB."""
    kept = measured.parameters + measured.optimizer
    peak = kept + max(measured.peak, measured.gradients + measured.optimizer_peak)
    return [
        str(layout),
        str(stage),
        f"{_kb(memory.weights)}, {_kb(measured.parameters)}",
        f"{_kb(memory.optimizer)}, {_kb(measured.optimizer)}",
        f"{_kb(memory.gradients)}, {_kb(measured.gradients)}",
        f"{_kb(memory.activations)}, {_kb(measured.peak - measured.gradients)}",
        _kb(measured.optimizer_peak),
        f"{_kb(memory.total)}, {_kb(peak)}",
        f"{peak / memory.total:.3f}",
    ]


def layout_rows(layout: Layout, shape: Shape, ranks: Sequence[Measured]) -> list[tuple[Row, Row]]:
    """Return the rows of bytes and of memory for each stage: of its rank that sends, or holds, the most."""
    found = []
    planned = plan(layout, shape)
    for stage, memory in enumerate(planned.memory):
        of_stage = [rank for rank in ranks if rank.stage == stage]
        sends_most = max(of_stage, key=lambda rank: sum(rank.sent.values()))
        holds_most = max(of_stage, key=lambda rank: rank.peak)
        found.append(
            (bytes_row(layout, shape, stage, planned, sends_most), memory_row(layout, stage, memory, holds_most))
        )
    return found


def average_rows(case: Case, ranks: Sequence[dict[str, Steps]]) -> list[Row]:
    """Return a row of medians for each contender, of the slower rank in each round."""
    rows: list[Row] = []
    for name in ranks[0]:
        steps = [rank[name] for rank in ranks]
        result = summary(steps)
        low, middle, high = result.share
        sizes = sorted({f"{each.gradients / 2**20:.0f}" for each in steps})
        rows.append(
            [
                case.name,
                f"{case.stages} x 2",
                name,
                ", ".join(sizes),
                *map(_ms, (result.at_end, result.overlapped, result.alone)),
                f"{result.cpu:.0%}",
                f"{middle:.2f} ({low:.2f} to {high:.2f})",
                "" if result.waited is None else _ms(result.waited),
            ]
        )
    return rows


def times_row(pair: str, ranks: Sequence[Sequence[Timed]]) -> Row:
    """Return a row of medians of the slower rank in each round."""
    ours, theirs = ([max(each) for each in _of_rounds(ranks, index)] for index in (0, 1))
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    of_rank: list[Timed] = max(([*rank] for rank in ranks), key=lambda rank: rank[0].sent)
    return [
        pair,
        of_rank[1].name,
        _ms(statistics.median(theirs)),
        _ms(statistics.median(ours)),
        f"{middle:.2f} ({low:.2f} to {high:.2f})",
        _kb(of_rank[1].sent),
        _kb(of_rank[0].sent),
    ]


def table(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return a table whose figures are aligned right."""
    return markdown_table(columns, rows, left=(LAYOUT, "dimension", "torch's own", "model", "contender"))


def _of_rounds(ranks: Sequence[Sequence[Timed]], index: int) -> Iterable[tuple[float, ...]]:
    return zip(*(rank[index].seconds for rank in ranks), strict=True)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}"


def _kb(size: float) -> str:
    return f"{size / 1000:,.1f}" if size else "0"
