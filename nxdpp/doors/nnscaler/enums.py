"""Choices of ``parallelize``, by member or by text."""

from enum import Enum
from typing import NoReturn


class _Choice(Enum):
    """Enumeration that names its values in the error for an unknown text."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        known = ", ".join(repr(member.value) for member in cls)
        raise ValueError(f"{cls.__name__} has no {value!r}: give one of {known}")


class ReuseType(_Choice):
    """Plan that ``parallelize`` may take from ``gen_savedir``.

    ``MATCH`` takes a plan that fits, and refuses any other plan. ``MOO``, match or override, makes a new one instead.
    ``GRAPH`` and ``OVERRIDE`` always make a new one.
    """

    MATCH = "match"
    OVERRIDE = "override"
    MOO = "moo"
    GRAPH = "graph"


class BroadcastGenFilesStrategy(_Choice):
    """Hosts that get a new plan from rank 0. Reused plans are never sent.

    ``NONE`` sends nothing. ``ALL``, ``NO_WEIGHTS`` and ``CODE`` send the plan to each host.
    """

    NONE = "none"
    ALL = "all"
    NO_WEIGHTS = "no_weights"
    CODE = "code"
