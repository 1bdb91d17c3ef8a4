"""Least bytes of activations that a rank holds at once under a family of schedules, without its actions."""

from collections.abc import Sequence

from nxdpp.pipeline.planning.layout import Layout
from nxdpp.pipeline.planning.stage_costs import StageCosts


def least_held(layout: Layout, rank: int, microbatches: int, stages: Sequence[StageCosts]) -> float:
    """Return the bytes for ``stages``, those of ``rank``; a lower bound of the peak over the schedule's actions."""
    everything = sum(stage.held for stage in stages)
    if layout.schedule in ("gpipe", "looped-bfs"):
        return microbatches * everything
    # The forwards of a rank before its first backward.
    p, v, behind = layout.pipeline, layout.chunks, layout.pipeline - rank
    chunks = {
        "1f1b": behind,
        "1f1b-eager": 2 * behind - 1,
        "zb-h1": behind,
        "interleaved": 2 * (behind - 1) + (v - 1) * min(p, microbatches) + 1,
        "zb1p": behind + (v - 1) * min(p, microbatches),
        "zb-v": 2 * p - 1,
        "dualpipe-v": 2 * p,
        "v-half": p // 2,
        "v-min": p // 3,
    }.get(layout.schedule, 1)
    least = min(stage.held for stage in stages)
    return max(min(chunks, v * microbatches) * least, everything / v)
