"""The variables of the launcher: this rank's numbers in the world and on its host.

::

    torchrun            RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
    srun                SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE
    mpirun              OMPI_COMM_WORLD_RANK, .._SIZE, .._LOCAL_RANK, .._LOCAL_SIZE
    a script over both  RANK and WORLD_SIZE set from them, with or without LOCAL_RANK

The variables in the first line come first. The variables of srun count only inside a step: the batch script of a job
has some of them too.
"""

import os
import re
from dataclasses import dataclass

_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launcher:
    """A rank's numbers in the world and on its host, as its launcher gives them; ``None`` if unknown.

    ``name`` is ``"torchrun"``, ``"srun"``, ``"mpirun"``, or ``"python"`` for a single process.
    """

    name: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None

    @property
    def is_alone(self) -> bool:
        """``True`` for a plain ``python script.py``."""
        return self.name == "python"

    @property
    def is_on_one_host(self) -> bool:
        """``True`` if all ranks are known to be on this host."""
        return self.local_world_size == self.world_size


def launcher(starts_world: bool = True) -> Launcher:
    """Return the numbers of this rank; raises ``RuntimeError`` if the variables are incomplete or no numbers.

    ``starts_world=False`` is for a running world, which needs no address any more.
    """
    address = _RENDEZVOUS if starts_world else ()
    if os.environ.get("RANK") or os.environ.get("WORLD_SIZE"):
        _check_present(("RANK", "WORLD_SIZE", *address), "RANK or WORLD_SIZE")
        return _of_torch(_number("RANK"), _number("WORLD_SIZE"))
    for found in (_of_mpirun(), _of_srun()):
        if found is not None and found.world_size > 1:
            _check_present(address, f"the variables of {found.name}, for {found.world_size} ranks,")
            return found
    return Launcher("python", 0, 1, 0, 1)


def _of_torch(rank: int, size: int) -> Launcher:
    if os.environ.get("LOCAL_RANK"):
        local_size = _number("LOCAL_WORLD_SIZE") if os.environ.get("LOCAL_WORLD_SIZE") else None
        return Launcher("torchrun", rank, size, _number("LOCAL_RANK"), local_size)
    # A script has taken RANK and WORLD_SIZE from a launcher that knows the local rank.
    for found in (_of_mpirun(), _of_srun()):
        if found is not None and (found.rank, found.world_size) == (rank, size):
            return found
    return Launcher("torchrun", rank, size, *((0, 1) if size == 1 else ()))


def _of_mpirun() -> Launcher | None:
    if not os.environ.get("OMPI_COMM_WORLD_SIZE"):
        return None
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return Launcher("mpirun", *(_number(f"OMPI_COMM_WORLD_{name}") for name in names))


def _of_srun() -> Launcher | None:
    if not os.environ.get("SLURM_STEP_NUM_TASKS") or not os.environ.get("SLURM_PROCID"):
        return None
    rank, size, local_rank = (_number(f"SLURM_{name}") for name in ("PROCID", "STEP_NUM_TASKS", "LOCALID"))
    return Launcher("srun", rank, size, local_rank, _slurm_tasks_here())


def _slurm_tasks_here() -> int | None:
    """Return the number of tasks on this host, from ``4(x2),3``: 4 on each of two hosts, 3 on the next."""
    listed: list[int] = []
    for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return None
        listed += [int(match[1])] * int(match[2] or 1)
    node = os.environ.get("SLURM_NODEID", "")
    return listed[int(node)] if node.isdecimal() and int(node) < len(listed) else None


def _check_present(names: tuple[str, ...], given: str) -> None:
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise RuntimeError(
            f"the environment has {given} but not {', '.join(missing)}: start the processes with torchrun, which sets "
            f"them all; or export them before srun or mpirun, with MASTER_ADDR the first host and MASTER_PORT a free "
            f"port there; or unset RANK and WORLD_SIZE to run as one process"
        )


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise RuntimeError(f"the variable {name} must be a number, not {value!r}: start the processes with torchrun")
    return int(value)
