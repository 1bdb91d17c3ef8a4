"""The plan in ``gen_savedir`` of several hosts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nxdpp import parallel_state
from nxdpp.doors.nnscaler import saved_plan as files
from nxdpp.doors.nnscaler.saved_plan import SavedPlan, plan_path, shared_layout
from nxdpp.doors.nnscaler.unit_layout import UnitLayout
from nxdpp.nnscaler import BroadcastGenFilesStrategy, ComputeConfig, ReuseType
from tests.doors.nnscaler.modules import Blocks
from tests.support.run_ranks import run_ranks

CONFIG = ComputeConfig(2, 4, use_end2end=True, pas_config={"pipeline_nmicros": 4})
NEW = UnitLayout(pipeline=2, schedule="gpipe", microbatches=4, cuts=("blocks.1",))


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_loaded", set())


def plan_in(folder: Path, config: ComputeConfig = CONFIG) -> SavedPlan:
    return SavedPlan(plan_path(folder, Blocks, None), Blocks(), config)


def _on_two_hosts(rank: int, folder: str) -> dict[str, Any]:
    parallel_state.initialize_model_parallel()
    host = rank // 2
    found: dict[str, Any] = {}
    made: list[int] = []

    def make() -> UnitLayout:
        made.append(rank)
        return NEW

    def fail() -> UnitLayout:
        raise ValueError("no layout")

    def call(name: str, reuse: str, strategy: str, layout: Callable[[], UnitLayout] = make, load: bool = True) -> str:
        plan = plan_in(Path(folder) / f"{name}{host}")
        try:
            shared_layout(plan, layout, ReuseType(reuse), BroadcastGenFilesStrategy(strategy), load)
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}".replace(folder, "FOLDER")
        return "has it" if plan.read() else "has none"

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(rank % 2))
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        found["all"] = call("all", "match", "all")
        found["none"] = call("none", "match", "none")
        found["not loaded"] = call("none", "match", "none", load=False)
        found["reused"] = call("none", "match", "all")
        dist.barrier()
        if rank == 2:
            plan = plan_in(Path(folder) / "none1")
            plan.write(plan_in(Path(folder) / "none0").read() or "")
        dist.barrier()
        found["copied"] = call("none", "match", "none")
        found["error"] = call("error", "match", "all", layout=fail)
    return {**found, "made": made}


def test_two_hosts(tmp_path: Path) -> None:
    results = run_ranks(4, _on_two_hosts, str(tmp_path))

    assert [result["made"] for result in results] == [[0] * 2, [], [], []]
    for rank, result in enumerate(results):
        for strategy in ("all", "copied"):
            assert result[strategy] == "has it"
        assert result["none"].startswith("RuntimeError: rank 2 on ")
        assert "has no plan FOLDER/none1/" in result["none"]
        assert "give broadcast_strategy='all', a gen_savedir that all hosts share, or copy rank 0's" in result["none"]
        assert result["not loaded"] == ("has it" if rank < 2 else "has none")
        assert "rank 0 reuses its plan, and reused plans are not sent: copy its file" in result["reused"]
        assert result["error"] == (
            "ValueError: no layout" if rank == 0 else "ValueError: on rank 0, ValueError: no layout"
        )
