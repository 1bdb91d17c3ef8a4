"""Pairs of stages that exchange tensors, for a model of the transport."""

from nxdpp.schedules.lowering.lowering import StagePair


def chain(stages: int) -> frozenset[StagePair]:
    """Return the pairs of each stage and the next."""
    return frozenset((stage, stage + 1) for stage in range(stages - 1))


def with_skips(stages: int) -> frozenset[StagePair]:
    """Return a chain, the pairs of each stage and the next but one, and those of the first stage and all others."""
    skips = {(stage, stage + 2) for stage in range(stages - 2)}
    return chain(stages) | skips | {(0, stage) for stage in range(1, stages)}
