"""The plan in ``gen_savedir``: its path and content, and the four kinds of reuse."""

import enum
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxdpp import parallel_state
from nxdpp.doors.nnscaler import saved_plan as files
from nxdpp.doors.nnscaler.saved_plan import SavedPlan, plan_path, shared_layout
from nxdpp.doors.nnscaler.unit_layout import UnitLayout
from nxdpp.nnscaler import BroadcastGenFilesStrategy, ComputeConfig, ReuseType
from tests.doors.nnscaler.modules import Blocks
from tests.support.run_ranks import run_ranks

CONFIG = ComputeConfig(2, 4, use_end2end=True, pas_config={"pipeline_nmicros": 4})
OTHER_CONFIG = ComputeConfig(2, 8, use_end2end=True, pas_config={"pipeline_nmicros": 4})
KEPT = UnitLayout(pipeline=2, schedule="1f1b", microbatches=4, cuts=("blocks.0",))
NEW = UnitLayout(pipeline=2, schedule="gpipe", microbatches=4, cuts=("blocks.1",))


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_loaded", set())


def plan_in(folder: Path, module: nn.Module | None = None, config: ComputeConfig = CONFIG) -> SavedPlan:
    return SavedPlan(plan_path(folder, Blocks, None), module or Blocks(), config)


def found_or_made(plan: SavedPlan, reuse: ReuseType) -> str:
    """The outcome of ``find_or_make`` in a word."""
    try:
        layout, is_new = plan.find_or_make(reuse, lambda: NEW)
    except RuntimeError as error:
        return "in use" if "in use by a module" in str(error) else "does not fit"
    assert layout == (NEW if is_new else KEPT)
    assert plan.layout_in(plan.read() or "") == layout
    return "new" if is_new else "kept"


def _equal(folder: Path) -> SavedPlan:
    return plan_in(folder)


def _other_config(folder: Path) -> SavedPlan:
    return plan_in(folder, config=OTHER_CONFIG)


def _other_layers(folder: Path) -> SavedPlan:
    return plan_in(folder, Blocks(layers=5))


def _half_written(folder: Path) -> SavedPlan:
    path = plan_path(folder, Blocks, None)
    path.write_text(path.read_text()[:100])
    return plan_in(folder)


def _garbage(folder: Path) -> SavedPlan:
    plan_path(folder, Blocks, None).write_bytes(b"\xff\x00")
    return plan_in(folder)


def _empty(folder: Path) -> SavedPlan:
    plan_path(folder, Blocks, None).unlink()
    return plan_in(folder)


MATRIX = [
    #               match           moo       graph     override
    (_empty, False, "new", "new", "new", "new"),
    (_equal, False, "kept", "kept", "new", "new"),
    (_other_config, False, "does not fit", "new", "new", "new"),
    (_other_layers, False, "does not fit", "new", "new", "new"),
    (_garbage, False, "does not fit", "new", "new", "new"),
    (_half_written, False, "does not fit", "new", "new", "new"),
    (_equal, True, "kept", "kept", "in use", "in use"),
    (_other_config, True, "does not fit", "in use", "in use", "in use"),
]


@pytest.mark.parametrize(("state", "loaded", "match", "moo", "graph", "override"), MATRIX)
def test_reuse(
    tmp_path: Path, state: Callable[[Path], SavedPlan], loaded: bool, match: str, moo: str, graph: str, override: str
) -> None:
    expected = {"match": match, "moo": moo, "graph": graph, "override": override}
    found = {}
    for reuse in ReuseType:
        folder = tmp_path / reuse.value
        plan_in(folder).find_or_make(ReuseType.MATCH, lambda: KEPT)
        plan = state(folder)
        if loaded:
            plan.note_loaded()
        found[reuse.value] = found_or_made(plan, reuse)
    assert found == expected


def test_the_message_names_the_difference_and_its_remedies_work(tmp_path: Path) -> None:
    plan_in(tmp_path).find_or_make(ReuseType.MATCH, lambda: KEPT)
    other = _other_config(tmp_path)

    told = "its runtime_ngpus is 4, and that of compute_config 8. Remove the file, or give reuse='override' or 'moo'"
    with pytest.raises(RuntimeError, match=told):
        other.find_or_make(ReuseType.MATCH, lambda: NEW)
    assert found_or_made(other, ReuseType.MOO) == "new"
    with pytest.raises(RuntimeError, match="it is for a module with other parts"):
        plan_in(tmp_path, Blocks(layers=5), OTHER_CONFIG).find_or_make(ReuseType.MATCH, lambda: NEW)


def test_a_failed_call_removes_the_old_plan_unless_it_matches(tmp_path: Path) -> None:
    def fail() -> UnitLayout:
        raise ValueError("no layout")

    plan = plan_in(tmp_path)
    plan.find_or_make(ReuseType.MATCH, lambda: KEPT)
    for reuse in (ReuseType.MATCH, ReuseType.MOO):
        assert plan.find_or_make(reuse, fail) == (KEPT, False)
    with pytest.raises(ValueError, match="no layout"):
        plan.find_or_make(ReuseType.OVERRIDE, fail)
    assert plan.read() is None
    assert found_or_made(plan, ReuseType.MATCH) == "new"


def test_content(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    plan.find_or_make(ReuseType.MATCH, lambda: KEPT)
    content = json.loads(plan.path.read_text())

    assert [path.name for path in plan.path.parent.iterdir()] == ["plan.json"]
    (tmp_path / "other").touch()
    assert plan.path.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert content["layout"]["cuts"] == ["blocks.0"]
    assert content["compute_config"]["pas_config"] == {"pipeline_nmicros": 4}
    assert content["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


def test_paths(tmp_path: Path) -> None:
    class Inner(nn.Module):
        pass

    folder = tmp_path / "_parallel_modules"
    assert plan_path(tmp_path, Blocks, None) == folder / "tests/doors/nnscaler/modules/Blocks/_/plan.json"
    assert plan_path(tmp_path, Blocks, "a.b") == folder / "tests/doors/nnscaler/modules/Blocks/a/b/plan.json"
    assert plan_path(tmp_path, Inner, "a").parts[-5:] == ("test_paths", "_locals_", "Inner", "a", "plan.json")
    for name in ("", "a/b", "..", "a..b"):
        with pytest.raises(ValueError, match="must have letters, digits, _ and -"):
            plan_path(tmp_path, Blocks, name)
    with pytest.raises(TypeError, match="instance_name must be text or None, not 3"):
        plan_path(tmp_path, Blocks, 3)  # type: ignore[arg-type]


class Colour(enum.Enum):
    RED = 1


def test_settings_of_the_user_count(tmp_path: Path) -> None:
    def config(value: Any) -> ComputeConfig:
        return ComputeConfig(1, 1, user_config={"value": value})

    values = [1, "a", (1, 2), {"b": None}, {3}, Path("c"), torch.float16, Colour.RED, nn.Linear, math.sqrt]
    for number, value in enumerate(values):
        plan = plan_in(tmp_path / str(number), config=config(value))
        assert found_or_made(plan, ReuseType.MATCH) == "new"
        assert plan_in(tmp_path / str(number), config=config(value)).find_or_make(ReuseType.MATCH, lambda: KEPT) == (
            NEW,
            False,
        )
        assert found_or_made(plan_in(tmp_path / str(number), config=config("other")), ReuseType.MATCH) == "does not fit"
    for value in (object(), lambda: None):
        with pytest.raises(ValueError, match=r"user_config\['value'\] is .* and a plan file keeps text, numbers"):
            plan_in(tmp_path, config=config(value))


def test_a_process_alone(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)

    assert shared_layout(plan, lambda: NEW, ReuseType.MATCH, BroadcastGenFilesStrategy.NONE, False) == NEW
    assert shared_layout(plan, lambda: KEPT, ReuseType.MATCH, BroadcastGenFilesStrategy.NONE, False) == NEW


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
        for strategy in ("all", "no_weights", "code"):
            found[strategy] = call(strategy, "match", strategy)
        found["none"] = call("none", "match", "none")
        found["not loaded"] = call("none", "match", "none", load=False)
        found["reused"] = call("none", "match", "all")
        dist.barrier()
        if rank == 2:
            plan = plan_in(Path(folder) / "none1")
            plan.write(plan_in(Path(folder) / "none0").read() or "")
        dist.barrier()
        found["copied"] = call("none", "match", "none")
        if rank == 2:
            (Path(folder) / "file1").touch()
        dist.barrier()
        found["a file in place of the folder"] = call("file", "match", "all")
        found["reused on one host"] = call("file", "match", "none")
        found["error"] = call("error", "match", "all", layout=fail)
    return {**found, "made": made}


def test_two_hosts(tmp_path: Path) -> None:
    results = run_ranks(4, _on_two_hosts, str(tmp_path))

    assert [result["made"] for result in results] == [[0] * 5, [], [], []]
    for rank, result in enumerate(results):
        for strategy in ("all", "no_weights", "code", "copied"):
            assert result[strategy] == "has it"
        assert result["none"].startswith("RuntimeError: rank 2 on ")
        assert "has no plan FOLDER/none1/" in result["none"]
        assert "give broadcast_strategy='all', a gen_savedir that all hosts share, or copy rank 0's" in result["none"]
        assert result["not loaded"] == ("has it" if rank < 2 else "has none")
        assert "rank 0 reuses its plan, and reused plans are not sent: copy its file" in result["reused"]
        assert "cannot write FOLDER/file1/" in result["a file in place of the folder"]
        assert "cannot read FOLDER/file1/" in result["reused on one host"]
        assert result["error"] == (
            "ValueError: no layout" if rank == 0 else "ValueError: on rank 0, ValueError: no layout"
        )
