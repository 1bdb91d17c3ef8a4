"""The engine's own share is measured without other ranks."""

from benchmarks.engine_share import RANKS, share_of
from nxdpp import parallel_state


def test_each_kind_of_action_is_counted() -> None:
    parallel_state.initialize_debug(pipeline_model_parallel_rank=1, pipeline_model_parallel_size=RANKS)
    try:
        share = share_of("zb1p", rank=1, steps=2)
    finally:
        parallel_state.destroy_model_parallel()
    # 2 stages of 32 microbatches: a forward, two gradients, two receives and two sends for each.
    assert share.actions == 7 * 64
    assert set(share.of_kinds) == {"forward", "split backward", "receive", "send and release"}
