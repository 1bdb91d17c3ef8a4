"""Cost at many ranks, computed from the code, against real groups and the table in benchmarks/results."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import cost_at_scale
from benchmarks.cost_at_scale import Group, groups_of_a_rank, requests_of_a_rank, rows
from nxdpp import parallel_state
from nxdpp.ranks import start_store
from tests.support.run_ranks import run_ranks

PAGE = Path(__file__).parents[2] / "benchmarks/results/cost_at_scale.md"


def _sizes_of_groups(rank: int) -> list[int]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    sizes = [dist.get_world_size(group) for group in dist.distributed_c10d._world.pg_map]
    parallel_state.destroy_model_parallel()
    return sorted(sizes)


@pytest.mark.cpu_only("it counts the groups of gloo")
def test_the_groups_are_those_of_a_real_job() -> None:
    computed = sorted(group.size for group in groups_of_a_rank("gloo", 4, 2, rank=1).own)
    assert run_ranks(4, _sizes_of_groups)[1] == computed


def test_2048_ranks_on_nccl_have_no_gloo_group_but_those_of_their_pipeline_and_replicas() -> None:
    groups = groups_of_a_rank("nccl", 2048, 64, rank=70).own
    assert sorted(group for group in groups if group.backend == "gloo") == [Group("gloo", 32), Group("gloo", 64)]
    assert sum(group.size == 2 for group in groups) == 4


@pytest.mark.parametrize("act", [start_store.store_of_start, cost_at_scale.exchange])
def test_requests_of_a_rank_do_not_grow_with_the_ranks(act: object) -> None:
    few, more = (requests_of_a_rank(act, ranks) for ranks in (3, 8))  # type: ignore[arg-type]
    assert max(few) == max(more) <= 5


def test_the_table_of_the_page_is_that_of_the_code() -> None:
    """All but the seconds, which depend on the machine."""
    computed = [rows(backend, 2048, 64, 191, 810, rate=1000.0) for backend in ("nccl", "gloo")]
    section = PAGE.read_text().partition("## 2,048 ranks")[2].partition("\n## ")[0]
    written = {cells[0]: cells[1:] for line in section.splitlines() if len(cells := _cells(line)) == 3}
    for name in computed[0]:
        if "seconds" not in name:
            assert written[name] == [column[name] for column in computed], name
        else:
            counts = [column[name].partition(", ")[0] for column in computed if ", " in column[name]]
            assert [cell.partition(", ")[0] for cell in written[name] if ", " in cell] == counts, name


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"\|", line)[1:-1]]
