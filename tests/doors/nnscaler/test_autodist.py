"""The policy ``autodist``: layouts that ``nxdpp.plan`` predicts, and its settings; no processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import nxdpp
from nxdpp import parallel_state
from nxdpp.doors.nnscaler import autodist as policy
from nxdpp.doors.nnscaler.policies import layout_of
from nxdpp.doors.nnscaler.unit_layout import UnitLayout
from nxdpp.nnscaler import ComputeConfig
from tests.doors.nnscaler.modules import Blocks, EndToEnd, sample_of


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


class Asking(EndToEnd):
    """A trace cannot answer what it asks about data."""

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = super().forward(data)
        return -loss if loss > 3 else loss


def test_a_module_that_is_not_traced_has_no_pipeline() -> None:
    reason = "Asking could not be traced with the inputs"
    with pytest.warns(UserWarning, match=f"autodist compares no pipelines: {reason}"):
        assert chosen(2, {"pipeline_nmicros": 4}, Asking()).tensor == 2
    with pytest.raises(ValueError, match=f"autodist finds no layout: {reason}"):
        chosen(2, {"pipeline_nmicros": 4, "max_partition_degree": 1}, Asking())


def test_stages_and_pivots() -> None:
    settings = {"pipeline_nmicros": 4, "pipeline_nstages": 4, "max_partition_degree": 1, "pipeline_pivots": "Block"}
    layout = chosen(2, settings, Blocks(layers=6))

    assert (layout.pipeline, layout.chunks, len(layout.cuts)) == (2, 2, 3)
    assert layout.layer_classes == ("Block",)
    assert all(cut.startswith("blocks.") for cut in layout.cuts)


def test_memory_decides() -> None:
    with pytest.raises(ValueError, match=r"autodist finds no layout\. .*the smallest one needs") as refused:
        chosen(2, {"pipeline_nmicros": 4, "mem_constraint": 1e-6})
    assert "1 tensor-parallel and 2 pipeline ranks" in str(refused.value)


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


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"pipeline_nstages": 2}, "pipeline_nmicros must be a whole number above 0, not 0"),
    ({"max_partition_degree": 3}, "max_partition_degree=3 must be a divisor of plan_ngpus=2"),
    ({"max_partition_degree": 1}, "A pipeline needs use_end2end=True and pipeline_nmicros or update_freq"),
    ({"partition_constraints_path": "a.yaml"}, "partition_constraints_path constrains single operations"),
    ({"recompute_modules": "Layer"}, "Blocks has no module 'Layer'"),
    ({"nmicros": 2}, "pas_config has nmicros, and policies have"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(2, settings)
