"""Bytes and memory of each dimension against formulas, for a tiny Llama; and the tables of the benchmark."""

from pathlib import Path

import pytest

from benchmarks.layouts import tables
from benchmarks.layouts.job import Layout, Shape, least_bytes, plan
from benchmarks.layouts.step import Measured, measure_rank
from benchmarks.page import replace_block
from tests.support.run_ranks import run_ranks

TINY = Shape(hidden=64, middle=128, layers=2, heads=4, vocabulary=64, batch=2, length=32, microbatches=2)
LAYOUTS = [Layout(2, 1, 1), Layout(1, 2, 1), Layout(2, 1, 1, sequence=True), Layout(1, 1, 2, zero1=True)]


def _measure(rank: int) -> list[Measured]:
    """Measure all layouts of two ranks, one after the other."""
    return [measure_rank(rank, layout, TINY) for layout in LAYOUTS]


@pytest.fixture(scope="module")
def ranks() -> list[list[Measured]]:
    return run_ranks(2, _measure, timeout=300.0)


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=map(str, LAYOUTS))
def test_bytes_and_memory_equal_the_formulas(number: int, ranks: list[list[Measured]]) -> None:
    layout = LAYOUTS[number]
    planned = plan(layout, TINY)
    for measured in (of_rank[number] for of_rank in ranks):
        memory = planned.memory[measured.stage]
        least = least_bytes(layout, TINY, planned, measured.stage)
        assert measured.sent["pipeline"] == least["pipeline"]
        assert measured.sent["data"] == least["data"]
        # Of two samples the plan has more than twice what one sends, as their work is; gradients of norms are left out.
        assert measured.sent["tensor"] == pytest.approx(planned.sent[measured.stage].tensor, rel=0.05)
        # Under sequence parallelism the layers gather their inputs again, which they do not keep.
        assert (measured.sent["tensor"] > least["tensor"]) == layout.sequence
        assert measured.sent["tensor"] >= least["tensor"]
        assert measured.sent["other"] == 0
        assert (measured.parameters, measured.gradients) == (memory.weights, memory.gradients)
        assert measured.optimizer == memory.optimizer
        # Formulas leave out what an operation or a message needs for a moment.
        assert 0.8 < (measured.peak - measured.gradients) / memory.activations < 1.5


def test_rows_fit_their_tables(ranks: list[list[Measured]]) -> None:
    for number, layout in enumerate(LAYOUTS):
        found = tables.layout_rows(layout, TINY, [of_rank[number] for of_rank in ranks])
        assert len(found) == layout.pipeline
        for sent, memory in found:
            assert (len(sent), len(memory)) == (len(tables.BYTES), len(tables.MEMORY))


def test_the_page_has_a_place_for_each_table() -> None:
    text = (Path(__file__).parents[2] / "benchmarks" / "results" / "dimensions.md").read_text()
    for name in ("bytes", "memory", "average", "times"):
        assert replace_block(text, name, "new") != text
