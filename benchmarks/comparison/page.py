"""Results of the comparison on their pages: tables of all cases, the main ones, and the picture."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.comparison.contenders import BY_HAND, NXDPP, TORCH
from benchmarks.comparison.rows import Row
from benchmarks.page import write_blocks
from benchmarks.report import markdown_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "compare.md"
PAGE = ROOT / "docs" / "performance.md"
PICTURE = RESULTS.with_suffix(".svg")

MAIN_CASES = {"efficiency": ["5 ms, m=32", "20 ms, m=32"], "overhead": ["p=2, m=32, wall", "p=4, m=32, wall"]}
"""Sections and cases of docs/performance.md."""


def write(rows: Sequence[Row], session: Mapping[str, Any]) -> None:
    """Write the sections of ``rows`` into both pages, and the picture if ``rows`` has its case."""
    sections = {section: [row for row in rows if row.section == section] for section in {row.section for row in rows}}
    measured = (
        "Commit {commit}; {processor}, {cores} cores, load {load_before} before; Python {python}, torch {torch}; "
        "medians of {steps} steps after {warm_up}.".format(**session)
    )
    write_blocks(RESULTS, {name: f"{measured}\n\n{table(own)}" for name, own in sections.items()})
    main = {
        name: re.sub("-{4,}", "---", re.sub(" +", " ", table([row for row in sections[name] if row.case in cases])))
        for name, cases in MAIN_CASES.items()
        if name in sections
    }
    write_blocks(PAGE, main)
    shown = [row for row in rows if (row.section, row.case) == ("efficiency", MAIN_CASES["efficiency"][0])]
    if shown:
        draw(shown, PICTURE)


def table(rows: Sequence[Row]) -> str:
    """A row for each schedule, a column for each case: nxdpp / torch (their ratio).

    The excess over an ideal is followed by the whole step over the ideal. Loops by hand have rows of their own.
    """
    cases = list(dict.fromkeys(row.case for row in rows))
    medians = {(row.family, row.contender, row.case): row for row in rows}
    lines = []
    for family in dict.fromkeys(row.family for row in rows):
        contenders = dict.fromkeys(row.contender for row in rows if row.family == family)
        if NXDPP in contenders:
            lines.append([family, *(_pair(medians, family, case) for case in cases)])
        lines += [
            [f"{family} {name}", *(_one(medians.get((family, name, case))) for case in cases)]
            for name in contenders
            if name not in (NXDPP, TORCH)
        ]
    return markdown_table(["schedule", *cases], lines, ["schedule"])


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the milliseconds above the ideal of each schedule, by contender, as bars into an SVG file."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    families = [row.family for row in rows if row.contender == NXDPP]
    colors = {NXDPP: "#2563eb", TORCH: "#9ca3af", BY_HAND: "#d1d5db"}
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nxdpp", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(7, 2.8), layout="constrained")
        for position, (contender, color) in enumerate(colors.items()):
            own = {row.family: row.quartiles[1] for row in rows if row.contender == contender}
            at = [families.index(family) + 0.28 * (position - 1) for family in own]
            axes.bar(at, list(own.values()), 0.26, color=color, label=contender)
        # Names are wider than their bars.
        axes.set_xticks(range(len(families)), families, rotation=30, ha="right", rotation_mode="anchor")
        axes.set_ylabel("ms above the ideal")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, ncols=3)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def _pair(medians: Mapping[tuple[str, str, str], Row], family: str, case: str) -> str:
    own, other = medians.get((family, NXDPP, case)), medians.get((family, TORCH, case))
    if own is None:
        return ""
    text = _one(own)
    if other is not None:
        text += f" / {_one(other)} ({own.quartiles[1] / other.quartiles[1]:.2f})"
    ideal = [verdict.ratio for verdict in own.verdicts if verdict.against.startswith("the ideal")]
    return text + "".join(f"; {ratio:.2f}" for ratio in ideal)


def _one(row: Row | None) -> str:
    if row is None:
        return ""
    value = row.quartiles[1]
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
