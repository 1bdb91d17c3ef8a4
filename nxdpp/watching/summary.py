"""A run in one JSON object: what the terminal and the page show."""

import re
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from nxdpp.counted import counted
from nxdpp.schedules.view.labels import NAMES, Labels, shade
from nxdpp.watching.metrics_reader import RankMetrics, RunMetrics

# Stages of a rank that are shown one by one.
_STAGES = 8
# Numbers above it could not be added up, or drawn.
_GREATEST = 1e300
_CONSEQUENCE = "stops because "


def summary_of(run: RunMetrics, now: float) -> dict[str, Any]:
    """Return the run as plain values; ``now`` is in seconds since 1970.

    Keys: ``folder``, ``now``, ``began_at``, ``seen_at``, ``step``, ``steps``, ``schedule``, ``command``, ``versions``,
    ``state``, ``curves`` (by name, ``[step, value]``; ``null`` for a value that is not finite), ``latest`` (the last
    value of each curve as text), ``world`` (the number of ranks, of which ``ranks`` has the rows that are there),
    ``ranks``, ``strip``, ``faults``, ``left`` (the error with which the program left a run without a fault) and
    ``experts``, and ``routing`` (the busiest expert and the share of each rank, of experts over ranks).
    """
    ranks, curves = run.ranks, run.curves()
    faults = _faults(ranks)
    about = ranks[0].about
    world = about.get("ranks", 1)
    left = next((rank.left for rank in ranks.values() if rank.left is not None), None)
    is_done = len(ranks) == world and all(rank.ends for rank in ranks.values())
    return {
        "folder": str(run.folder),
        "now": now,
        "began_at": ranks[0].began_at,
        "seen_at": max(rank.seen_at for rank in ranks.values()),
        "step": max(rank.last.get("step", about.get("done", 0)) for rank in ranks.values()),
        "steps": about.get("steps"),
        "schedule": about.get("schedule", ""),
        "command": about.get("command", ""),
        "versions": about.get("versions", {}),
        "state": "fault" if faults else "done" if is_done else "running" if left is None else "left",
        "left": left,
        "world": world,
        "curves": {
            name: [(step, value if abs(value) < _GREATEST else None) for step, value in curve]
            for name, curve in curves.items()
        },
        "latest": {name: _shown(curve[-1][1]) for name, curve in curves.items()},
        "ranks": [_row(number, rank, faults) for number, rank in ranks.items()],
        "strip": _strip(ranks),
        "faults": faults,
        "experts": _experts(ranks),
        "routing": _routing(ranks),
    }


def _row(number: int, rank: RankMetrics, faults: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the table of ranks says of one rank."""
    state = "fault" if rank.fault else "done" if rank.ends else "running" if rank.left is None else "left"
    if state == "running" and any(number in fault["named"] for fault in faults):
        state = "died"
    return {
        "rank": number,
        "stages": _listed(rank.about.get("stages", [])),
        "replica": rank.about.get("replica", 0),
        "host": rank.about.get("host", ""),
        "device": rank.about.get("device", ""),
        "step": rank.last.get("step"),
        "busy": fmean(rank.busy) if rank.busy else None,
        "bytes": rank.last.get("bytes"),
        "seconds": rank.last.get("seconds"),
        "seen_at": rank.seen_at,
        "state": state,
    }


def _listed(stages: Sequence[int]) -> str:
    """Return the stages of a rank as text: the first ones and the last one where they are many."""
    if len(stages) <= _STAGES:
        return ", ".join(map(str, stages))
    first = ", ".join(map(str, stages[: _STAGES - 1]))
    return f"{first} ... {stages[-1]} ({counted(len(stages), 'stage')})"


def _faults(ranks: dict[int, RankMetrics]) -> list[dict[str, Any]]:
    """Return each fault with the ranks that told it and those that its sentence names; a rank's own error first."""
    told: dict[str, list[int]] = {}
    own = []
    for number, rank in ranks.items():
        if rank.fault is None:
            continue
        if rank.fault.startswith(_CONSEQUENCE):
            told.setdefault(rank.fault.removeprefix(_CONSEQUENCE), []).append(number)
        else:
            own.append({"text": f"rank {number}: {rank.fault}", "told_by": [number], "named": [number]})
    return own + [{"text": text, "told_by": by, "named": _named(text)} for text, by in told.items()]


def _named(sentence: str) -> list[int]:
    """Return the ranks with which a sentence begins: ``rank 2 died``, ``ranks 1 and 3 ended``."""
    found = re.match(r"ranks? ((?:\d+|, | and )+)", sentence)
    return [int(number) for number in re.findall(r"\d+", found[1])] if found is not None else []


def _strip(ranks: dict[int, RankMetrics]) -> dict[str, Any] | None:
    """Return the last step whose actions all ranks have: label, kind, colour, start and end in ms, for each rank."""
    common = set.intersection(*(set(rank.actions) for rank in ranks.values()))
    if not common:
        return None
    step = max(common)
    rows = [rank.actions[step] for rank in ranks.values()]
    labels = Labels(rows)
    origin = min(span.start for row in rows for span in row)

    def ms(time: float) -> float:
        return round(1000 * (time - origin), 3)

    return {
        "step": step,
        # A strip of no length has no scale.
        "ms": max(0.001, ms(max(span.end for row in rows for span in row))),
        "kinds": {kind.value: [NAMES[kind], shade(kind, labels.chunks - 1, labels.chunks)] for kind in labels.kinds},
        "ranks": [
            [
                [
                    labels.label(span.action),
                    span.action.kind.value,
                    shade(span.action.kind, labels.chunk(span.action), labels.chunks),
                    ms(span.start),
                    ms(span.end),
                ]
                for span in row
            ]
            for row in rows
        ],
    }


def _experts(ranks: dict[int, RankMetrics]) -> list[float] | None:
    """Return the tokens of each expert in the last step, the sum over the ranks of tensor rank 0 that tell them.

    The other tensor ranks have the same tokens.
    """
    firsts = [rank.last.get("experts") for rank in ranks.values() if rank.about.get("tensor_rank", 0) == 0]
    told = [each for each in firsts if isinstance(each, list)]
    if not told or len({len(each) for each in told}) > 1:
        return None
    try:
        sums = [sum(map(float, each)) for each in zip(*told, strict=True)]
    except (ValueError, TypeError, OverflowError):
        return None
    return sums if min(sums, default=0) >= 0 and sum(sums) < _GREATEST else None


def _routing(ranks: dict[int, RankMetrics]) -> dict[str, Any] | None:
    """Return the most of ``largest_over_mean`` over the ranks with its place, and the share of each rank, by number."""
    told = {number: rank.last["routing"] for number, rank in ranks.items() if "routing" in rank.last}
    if not told:
        return None
    most = max(told.values(), key=lambda each: each["largest_over_mean"])
    return {name: most[name] for name in ("largest_over_mean", "largest")} | {
        "shares_of_ranks": {number: each["share"] for number, each in told.items()}
    }


def _shown(value: float) -> str:
    """Return a value with four digits, and thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
