"""NCCL's rules over gloo: groups of two ranks, the global order of receives, messages matched by their order.

Each rank waits for the end of each message as soon as it has started it. No backend waits more.
"""

import pytest

from nxdpp.schedules.families.registry import FAMILIES
from tests.pipeline.runtime.scheduled_models import Chain, Skips, Tied, v_schedule
from tests.pipeline.whole.test_schedules_over_ranks import check_training, chunks_of, start
from tests.support.nccl_rules import use_nccl_rules, wait_for_each_message
from tests.support.run_ranks import run_ranks


def train(rank: int, ranks: int) -> None:
    use_nccl_rules()
    wait_for_each_message()
    start(ranks)
    for name in FAMILIES:
        check_training(Skips, ranks * chunks_of(name), ranks + 1, schedule=name, deallocate_pipeline_outputs=True)
    for name in ("1f1b", "zb-v"):
        check_training(Tied, ranks * chunks_of(name), 1, schedule=name)
    check_training(Skips, 2 * ranks, ranks + 1, schedule=v_schedule(ranks, ranks + 1))


def test_every_family_trains_as_one_process_and_may_wait_for_each_message() -> None:
    """Of four ranks in a ring, two pairs are no neighbours: tensors that skip stages use the other groups."""
    run_ranks(4, train, 4)


def train_as_on_gloo(rank: int) -> None:
    wait_for_each_message()
    start(3)
    check_training(Chain, 4, 7, schedule="1f1b")


@pytest.mark.cpu_only("a device has no calls of gloo")
def test_ranks_that_post_receives_ahead_may_not() -> None:
    """The ranks wait for each other, and the test ends them."""
    with pytest.raises(AssertionError, match=r"timeout after 3\.0 s: rank 0, 1, 2 still running of 3 ranks"):
        run_ranks(3, train_as_on_gloo, timeout=3.0)
