"""Ranks of published layouts at full size, on tensors without memory, next to the plan."""

import pytest

from benchmarks.planner import every_rank, published
from tests.support import fake_device
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.skipif(fake_device.why_not() is not None, reason=str(fake_device.why_not()))

LAYOUTS = every_rank.layouts()
NAMES = [f"{run.name}, {layout.schedule} {layout.chunks}" for run, layout, _ in LAYOUTS]


def _peaks(_: int, number: int) -> list[every_rank.RankPeak]:
    run, layout, _gib = LAYOUTS[number]
    plan = every_rank.plan_of(run, layout)
    return every_rank.peaks(run, plan, range(layout.pipeline))


@pytest.mark.sweep
@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=NAMES)
def test_every_rank_has_the_planned_peak_and_its_part_of_a_checkpoint(number: int) -> None:
    (found,) = run_ranks(1, _peaks, number, timeout=3000)
    for each in found:
        assert 0.9 < each.peak / each.planned < 1.1, each
        # Parameters and two moments of float32; of DeepSeek-V3 also buffers.
        assert each.saved == pytest.approx(12 * each.parameters, rel=1e-5)
        assert each.read == each.saved
    whole = published.model_of(LAYOUTS[number][0].model).state_dict()
    assert sorted(name for each in found for name in each.names) == sorted(whole)
