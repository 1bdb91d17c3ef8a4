"""A rank's numbers follow from the variables of its launcher."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from nxdpp.ranks import parallel_state
from nxdpp.ranks.launcher import Launcher, launcher
from tests.support.fake_cuda import LAUNCHER_VARIABLES

HOST = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "10",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def _with(patch: pytest.MonkeyPatch, variables: dict[str, str]) -> Launcher:
    for name, value in variables.items():
        patch.setenv(name, value)
    return launcher()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Launcher("python", 0, 1, 0, 1)),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **HOST},
            Launcher("torchrun", 5, 8, 1, 4),
        ),
        # torchrun, started once on each host by srun.
        (
            {"RANK": "9", "WORLD_SIZE": "80", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", **HOST, **SRUN},
            Launcher("torchrun", 9, 80, 1, 8),
        ),
        ({"RANK": "5", "WORLD_SIZE": "8", **HOST}, Launcher("torchrun", 5, 8, None, None)),
        ({**SRUN, **HOST}, Launcher("srun", 5, 10, 1, 4)),
        ({**SRUN, **HOST, "SLURM_NODEID": "2"}, Launcher("srun", 5, 10, 1, 2)),
        # The script exports torch's variables from srun's.
        ({**SRUN, **HOST, "RANK": "5", "WORLD_SIZE": "10"}, Launcher("srun", 5, 10, 1, 4)),
        ({**MPIRUN, **HOST}, Launcher("mpirun", 3, 8, 1, 2)),
        # mpirun starts its processes through srun.
        ({**SRUN, **MPIRUN, **HOST}, Launcher("mpirun", 3, 8, 1, 2)),
        # The batch script of a job, and a step of one task.
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}, Launcher("python", 0, 1, 0, 1)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Launcher("python", 0, 1, 0, 1)),
    ],
)
def test_numbers(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: Launcher) -> None:
    assert _with(monkeypatch, variables) == expected


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (SRUN, "MASTER_ADDR, MASTER_PORT"),
        ({**MPIRUN, "MASTER_ADDR": "node1"}, "MASTER_PORT"),
    ],
)
def test_missing_variables_are_named(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], missing: str) -> None:
    with pytest.raises(RuntimeError, match=f"but not {missing}: start the processes with torchrun"):
        _with(monkeypatch, variables)
    # The remedy: set them.
    assert _with(monkeypatch, {"WORLD_SIZE": "8", "RANK": "3", **HOST}).rank == 3


def test_a_running_world_needs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Train with ``init_method="tcp"`` leaves the address out of the variables."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        assert parallel_state.local_device() == torch.device("cpu")
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
