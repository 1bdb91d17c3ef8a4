"""The content of a checkpoint's document, of what all ranks have told rank 0."""

from collections.abc import Sequence
from typing import Any

from nxdpp.checkpoint.distributed.captured import Described, Part
from nxdpp.checkpoint.distributed.optimizers import SavedOptimizer, written_optimizers
from nxdpp.checkpoint.distributed.parameter_groups import are_alike, joined_groups
from nxdpp.checkpoint.distributed.schedulers import joined_state


def content_of(of_ranks: Sequence[Described]) -> dict[str, Any]:
    """Return the content. Raises ``ValueError`` for ranks that contradict each other."""
    first = of_ranks[0]
    _check_copies(of_ranks)
    optimizer, scheduler = _of_optimizers(of_ranks)
    return {
        "layout": first.layout,
        "ties": first.ties,
        "configuration": first.configuration,
        "optimizer": optimizer,
        "quantized": {name: found for described in of_ranks for name, found in described.quantized.items()},
        "random": [described.random for described in of_ranks],
        **first.others,
        "scheduler": scheduler,
    }


def _of_optimizers(of_ranks: Sequence[Described]) -> tuple[dict[str, Any] | None, Any]:
    """The optimizers of all ranks, and the scheduler, whose values for groups are in the order of the joined groups."""
    first = of_ranks[0]
    scheduler = first.others["scheduler"]
    if not first.optimizers:
        return None, scheduler
    saved = {}
    for name, optimizer in first.optimizers.items():
        groups = [described.optimizers[name].groups for described in of_ranks]
        joined = joined_groups(groups)
        if not are_alike(groups):
            _check_schedulers(of_ranks)
            scheduler = joined_state(scheduler, [group.scheduled for group in joined])
        saved[name] = SavedOptimizer(optimizer.kind, joined)
    written = {**written_optimizers(saved), "states": _states(of_ranks)}
    if first.have_names:
        written["has_names"] = True
    return written, scheduler


def _states(of_ranks: Sequence[Described]) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for rank, described in enumerate(of_ranks):
        for name, state in described.states.items():
            if states.setdefault(name, state) != state:
                raise ValueError(
                    f"ranks have different optimizer state of {name}: {states[name]} and, on rank {rank}, {state}. "
                    f"Step the optimizer on every rank alike."
                )
    return states


def _check_schedulers(of_ranks: Sequence[Described]) -> None:
    """Raise ``ValueError`` for schedulers that differ in more than the values of groups."""
    for rank, described in enumerate(of_ranks):
        if described.scheduler != of_ranks[0].scheduler:
            raise ValueError(
                f"schedulers are in different states on ranks 0 and {rank}: {of_ranks[0].scheduler:.300} and "
                f"{described.scheduler:.300}. Step the scheduler on every rank alike."
            )


def _check_copies(of_ranks: Sequence[Described]) -> None:
    """Raise ``ValueError`` for ranks with different values of one part of a parameter: one would be lost."""
    first: dict[Part, tuple[int, bytes]] = {}
    for rank, described in enumerate(of_ranks):
        for part, found in described.samples.items():
            other, expected = first.setdefault(part, (rank, found))
            if found != expected:
                raise ValueError(
                    f"{part[0]} has other values on rank {rank} than on rank {other}, which has the same part of it: "
                    f"the ranks have gone apart. Load the same checkpoint on all ranks. A module that is not wrapped "
                    f"must be the same on all of them."
                )
