"""Engines that a rank keeps: as many as the limit on every rank, and none after ``refresh``."""

import gc
from unittest import mock

import pytest

from nxdpp import NxDPPModel, parallel_state
from nxdpp.agreement import step_signature
from nxdpp.pipeline.p2p.transport import Direction, Transport
from nxdpp.pipeline.runtime import engines as engines_module
from nxdpp.pipeline.runtime.engine import Engine
from nxdpp.schedules.lowering.releases import rank_program
from tests.support.models import make, padded_batch
from tests.support.run_ranks import run_ranks


def engines() -> int:
    gc.collect()
    return sum(type(found) is Engine for found in gc.get_objects())


def keep_two_engines(rank: int) -> tuple[list[int], int, int]:
    """Numbers of engines after steps of three signatures and after ``refresh``; of metadata exchanges; of lowerings."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    step_signature.KEPT = 2
    sent = 0
    send = Transport.send_object

    def counting(self: Transport, value: object, destination: int, tag: int, direction: Direction) -> None:
        nonlocal sent
        sent += 1
        send(self, value, destination, tag, direction)

    Transport.send_object = counting  # type: ignore[method-assign]
    lower = mock.Mock(wraps=rank_program)
    pytest.MonkeyPatch().setattr(engines_module, "rank_program", lower)
    wrapped = NxDPPModel(make("llama"), num_microbatches=2)
    counts = []
    # The second step of length 8 is the only one with a known signature.
    for length in (6, 8, 8, 10, 6):
        wrapped.run_train(**padded_batch(4, length))
        counts.append(engines())
    wrapped.refresh()
    return [*counts, engines()], sent, lower.call_count


def test_all_ranks_keep_the_same_engines() -> None:
    first, last = run_ranks(2, keep_two_engines)
    # The schedule is lowered once: with many ranks that takes seconds.
    assert first == ([1, 2, 2, 2, 2, 0], 4, 1)
    assert last == ([1, 2, 2, 2, 2, 0], 4, 1)
