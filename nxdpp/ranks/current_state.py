"""The state that all getters of ``parallel_state`` read: process groups, the debug mode, or nothing yet."""

import torch.distributed as dist

from nxdpp.ranks.debug_state import DebugState
from nxdpp.ranks.process_groups import ProcessGroups
from nxdpp.ranks.rank_mesh import DIMENSIONS

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
    """The state of a running job, which ``what`` needs.

    Raises ``RuntimeError`` before an initialization and in the debug mode.
    """
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
