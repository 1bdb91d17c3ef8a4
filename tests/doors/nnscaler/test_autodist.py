"""The policy ``autodist``: layouts that ``nxdpp.plan`` predicts, and its settings; no processes."""

import json
from pathlib import Path
from typing import Any

import pytest

import nxdpp
from nxdpp import parallel_state
from nxdpp.doors.nnscaler import autodist as policy
from nxdpp.doors.nnscaler.policies import layout_of
from nxdpp.doors.nnscaler.unit_layout import UnitLayout
from nxdpp.nnscaler import ComputeConfig
from tests.doors.nnscaler.modules import Blocks, sample_of


def chosen(ranks: int, settings: dict[str, Any] | None = None, module: Any = None, **given: Any) -> UnitLayout:
    compute = ComputeConfig(ranks, 2 * ranks, **{"use_end2end": True, **given}, pas_config=settings or {})
    module = module or Blocks()
    return layout_of("autodist", module, sample_of(module), compute)


def test_without_a_choice_all_ranks_share_each_layer() -> None:
    assert chosen(1) == UnitLayout()
    for layout in (chosen(2), chosen(2, use_end2end=False), chosen(2, {"pipeline_nstages": 1, "update_freq": 4})):
        assert (layout.tensor, layout.pipeline) == (2, 1)
        assert layout.plan is not None


def test_it_takes_the_prediction_with_the_shortest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    plan = nxdpp.plan

    def recorded(*args: Any, **kwargs: Any) -> Any:
        found = plan(*args, **kwargs)
        fixed = kwargs["fixed"]
        seen[fixed["tensor"], fixed["pipeline"]] = found.first
        assert (fixed["data"], fixed["microbatch"], kwargs["global_batch"]) == (2, 1, 16)
        return found

    monkeypatch.setattr(policy, "plan", recorded)
    layout = chosen(4, {"pipeline_nmicros": 8})
    best = min(seen.values(), key=lambda each: each.step_seconds)

    assert sorted(seen) == [(1, 4), (2, 2), (4, 1)]
    assert (layout.tensor, layout.pipeline, layout.chunks) == (
        best.layout.tensor,
        best.layout.pipeline,
        best.layout.chunks,
    )
    assert list(layout.cuts) == list(best.cuts)
    assert not parallel_state.model_parallel_is_initialized()


def test_recomputed_modules() -> None:
    assert chosen(1, {"recompute_modules": "Block, head"}).recompute == (*(f"blocks.{i}" for i in range(4)), "head")


def test_a_layout_is_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    settings = {"pipeline_nmicros": 4, "max_partition_degree": 1}
    layout = chosen(2, {**settings, "save_plan_path": str(path)})

    assert chosen(2, {"load_plan_path": path}) == layout
    with pytest.raises(ValueError, match="the layout is for 2 ranks, and plan_ngpus is 4"):
        chosen(4, {"load_plan_path": path})
    with pytest.raises(ValueError, match="a pipeline needs use_end2end=True"):
        chosen(2, {"load_plan_path": path}, use_end2end=False)
    path.write_text(json.dumps({"tensor": 2}))
    with pytest.raises(ValueError, match="is no layout of a unit"):
        chosen(2, {"load_plan_path": path})
    with pytest.raises(ValueError, match=r"there is no layout .* write it with save_plan_path"):
        chosen(2, {"load_plan_path": tmp_path / "other"})
