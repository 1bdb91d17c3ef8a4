"""The state that all getters of ``parallel_state`` read: process groups, the debug mode, or nothing yet.

In the debug mode it is the rank and size in each dimension of a job that does not run.
"""

from dataclasses import dataclass

import torch.distributed as dist

from nxdpp.ranks.process_groups import ProcessGroups
from nxdpp.ranks.rank_mesh import DIMENSIONS, RankMesh


@dataclass(frozen=True)
class DebugState:
    """This rank's index by dimension, without process groups; ``ValueError`` for a size or an index out of range."""

    ranks: dict[str, int]
    rank_mesh: RankMesh
    expert_size: int = 1
    context_size: int = 1

    def __post_init__(self) -> None:
        for dimension, rank in self.ranks.items():
            name, size = f"{_argument(dimension)}_size", self.rank_mesh.size(dimension)
            if not _is_integer(size) or size < 1:
                raise ValueError(f"{name}={size!r} must be an integer of at least 1.")
            if not _is_integer(rank) or not 0 <= rank < size:
                raise ValueError(
                    f"{_argument(dimension)}_rank={rank!r} must be an integer from 0 to {size - 1}, because {name} is "
                    f"{size}."
                )

    def rank(self, dimension: str) -> int:
        """This rank's index along ``dimension``."""
        return self.ranks[dimension]

    def refusal(self, what: str) -> RuntimeError:
        """The error for ``what``, which needs the processes of a running job."""
        place = f"pipeline rank {self.rank('pipeline')} of {self.rank_mesh.pipeline}"
        return RuntimeError(
            f"{what} needs the processes of a running job, but this process is in the debug mode of parallel_state "
            f"(initialize_debug, {place}). Start the ranks with torchrun and call "
            f"parallel_state.initialize_model_parallel on each rank, in this process after destroy_model_parallel()."
        )

    def __str__(self) -> str:
        places = (f"{name} rank {rank} of {self.rank_mesh.size(name)}" for name, rank in self.ranks.items())
        order = "" if self.rank_mesh.order == DIMENSIONS else f", order {' > '.join(self.rank_mesh.order)}"
        return ", ".join(places) + order


def _argument(dimension: str) -> str:
    return "data_parallel" if dimension == "data" else f"{dimension}_model_parallel"


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_state: ProcessGroups | DebugState | None = None


def replace(state: ProcessGroups | DebugState | None) -> None:
    """Make ``state`` the one of this process."""
    global _state
    _state = state


def running() -> ProcessGroups | DebugState | None:
    """The state, ``None`` before an initialization and after the end of its world."""
    if isinstance(_state, DebugState):
        return _state
    is_running = _state is not None and dist.is_initialized() and dist.group.WORLD is _state.world
    return _state if is_running else None


def initialized() -> ProcessGroups | DebugState:
    """The state. Raises ``RuntimeError`` before an initialization."""
    state = running()
    if state is None:
        raise RuntimeError(
            "there are no process groups yet: call nxdpp.parallel_state.initialize_model_parallel("
            "pipeline_model_parallel_size=...) first, on all ranks"
        )
    return state


def with_groups(what: str = "a process group") -> ProcessGroups:
    """The state of a running job, which ``what`` needs; ``RuntimeError`` before one and in the debug mode."""
    state = running()
    if isinstance(state, ProcessGroups):
        return state
    debug = initialized()
    assert isinstance(debug, DebugState), "the other of the two"
    raise debug.refusal(what)


def own_ranks(dimension: str) -> list[int]:
    """Global ranks of this rank's group along ``dimension``."""
    state = initialized()
    own = state.rank_mesh.rank_at(**{name: state.rank(name) for name in DIMENSIONS})
    return next(ranks for ranks in state.rank_mesh.groups(dimension) if own in ranks)
