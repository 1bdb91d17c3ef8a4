"""Getters of sizes and ranks, under the names of NeuronX Distributed. No getter is collective.

All raise ``RuntimeError`` before ``initialize_model_parallel``. In the debug mode they answer as on its rank. A rank in
a dimension is an index; "global rank" is the rank in ``torch.distributed``.
"""

from nxdpp.ranks import current_state
from nxdpp.ranks.current_state import DebugState
from nxdpp.ranks.rank_mesh import DIMENSIONS


def get_tensor_model_parallel_size() -> int:
    """Number of ranks that share each layer."""
    return _size("tensor")


def get_data_parallel_size() -> int:
    """Number of ranks with this rank's stages that train different rows."""
    return _size("data") // get_context_model_parallel_size()


def get_replica_size() -> int:
    """Number of ranks with this rank's parameters: data times context."""
    return _size("data")


def get_pipeline_model_parallel_size() -> int:
    """Number of ranks in a pipeline."""
    return _size("pipeline")


def get_context_model_parallel_size() -> int:
    """Number of ranks that share each sequence."""
    return current_state.initialized().context_size


def get_expert_model_parallel_size() -> int:
    """Number of ranks in an expert group, which share the experts of each layer."""
    return current_state.initialized().expert_size


def get_expert_data_parallel_size() -> int:
    """Number of ranks with the same experts, among the ranks with the same stages."""
    return get_replica_size() // get_expert_model_parallel_size()


def get_tensor_model_parallel_rank() -> int:
    """This rank's index in its tensor group."""
    return _rank("tensor")


def get_data_parallel_rank() -> int:
    """This rank's index in its data group."""
    return _rank("data") // get_context_model_parallel_size()


def get_replica_rank() -> int:
    """This rank's index among the ranks with its parameters."""
    return _rank("data")


def get_pipeline_model_parallel_rank() -> int:
    """This rank's index in its pipeline group; rank 0 has the first layers."""
    return _rank("pipeline")


def get_context_model_parallel_rank() -> int:
    """This rank's index among the ranks that share each sequence."""
    return _rank("data") % get_context_model_parallel_size()


def get_context_model_parallel_src_tgt_pairs() -> list[tuple[int, int]]:
    """Pairs of global ranks that are neighbours in a ring over a sequence: each sends to the next one.

    There are none where no sequence is divided.
    """
    size, first = get_context_model_parallel_size(), get_replica_rank() - get_context_model_parallel_rank()
    ranks = current_state.own_ranks("data")[first : first + size]
    return [] if size == 1 else list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))


def get_expert_model_parallel_rank() -> int:
    """This rank's index in its expert group; rank 0 has the first experts."""
    return get_replica_rank() % get_expert_model_parallel_size()


def get_expert_data_parallel_rank() -> int:
    """This rank's index among the ranks with the same experts."""
    return get_replica_rank() // get_expert_model_parallel_size()


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first rank of this rank's tensor group."""
    return current_state.own_ranks("tensor")[0]


def get_data_parallel_src_rank() -> int:
    """Global rank of the first rank of this rank's data group."""
    return current_state.own_ranks("data")[get_context_model_parallel_rank()]


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first rank of this rank's pipeline."""
    return current_state.own_ranks("pipeline")[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last rank of this rank's pipeline."""
    return current_state.own_ranks("pipeline")[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next rank of this rank's pipeline; the first one follows the last."""
    return _beside(1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous rank of this rank's pipeline; the last one precedes the first."""
    return _beside(-1)


def is_pipeline_first_stage() -> bool:
    """Return whether this rank is the first of its pipeline."""
    return _rank("pipeline") == 0


def is_pipeline_last_stage() -> bool:
    """Return whether this rank is the last of its pipeline. ``holds_last_stage`` of a model tells who has the loss."""
    return _rank("pipeline") == _size("pipeline") - 1


def rmsg(msg: str) -> str:
    """Return ``msg`` after the place of this rank, for logs: ``"[rank 5: pipeline 1, data 0, tensor 1] msg"``.

    Before ``initialize_model_parallel`` the place is unknown: a message never raises.
    """
    state = current_state.running()
    if state is None:
        return f"[rank unknown] {msg}"
    place = {dimension: state.rank(dimension) for dimension in DIMENSIONS}
    rank = state.rank_mesh.rank_at(**place)
    kind = "debug mode, rank" if isinstance(state, DebugState) else "rank"
    return f"[{kind} {rank}: {', '.join(f'{dimension} {index}' for dimension, index in place.items())}] {msg}"


# The names in NxD's tensor-parallel guide.
get_tensor_parallel_size = get_tensor_model_parallel_size
get_data_parallel_world_size = get_data_parallel_size


def _size(dimension: str) -> int:
    return current_state.initialized().rank_mesh.size(dimension)


def _rank(dimension: str) -> int:
    return current_state.initialized().rank(dimension)


def _beside(step: int) -> int:
    ranks = current_state.own_ranks("pipeline")
    return ranks[(_rank("pipeline") + step) % len(ranks)]
