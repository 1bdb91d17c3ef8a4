"""Rules of a transport: the process groups of its messages, and the places of its receives.

::

    gloo   a message has a tag; a posted receive waits in host memory
           one group for all ranks; receives are posted two compute actions ahead
    NCCL   messages are matched by their order; a posted receive is a kernel that holds the device
           a group of two ranks for each pair of neighbours and way; receives are posted in one global order
"""

from typing import NamedTuple

# (source, destination): two ranks of a pipeline, and the way of the messages between them.
RankPair = tuple[int, int]


class TransportRules(NamedTuple):
    """Rules of one backend.

    Attributes:
        name: name of the backend.
        posted_ahead: number of compute actions between a receive and its use. ``None`` for the global order, in which
            no rank can wait for another forever, even if it waits for each message as soon as it is started.
        pair_groups: ``True`` for a group of two ranks for each of ``neighbouring_pairs``, ``False`` for groups over all
            ranks only.
        has_tags: ``True`` if messages have tags. Otherwise they are matched by their order.
    """

    name: str
    posted_ahead: int | None
    pair_groups: bool
    has_tags: bool


GLOO = TransportRules("gloo", posted_ahead=2, pair_groups=False, has_tags=True)
NCCL = TransportRules("nccl", posted_ahead=None, pair_groups=True, has_tags=False)

# The rules of each backend. Tests put NCCL's in place of gloo's.
RULES = {rules.name: rules for rules in (GLOO, NCCL)}


def rules_of(backend: str) -> TransportRules:
    """Return the rules of a backend: NCCL's for each that sends from the memory of a device."""
    return RULES.get(backend, NCCL)


def neighbouring_pairs(ranks: int) -> list[RankPair]:
    """Return the pairs of neighbours in a ring of ``ranks``, each in both ways, in the order of their groups.

    All ranks make the groups in this order. Two ranks are neighbours once. Half of the pairs have no rank in common
    and come first: their first exchanges run at the same time.
    """
    ring = [(rank, rank + 1) for rank in range(ranks - 1)]
    closing = [(ranks - 1, 0)] if ranks > 2 else []
    return [pair for each in (ring[::2], ring[1::2], closing) for pair in (*each, *((b, a) for a, b in each))]
