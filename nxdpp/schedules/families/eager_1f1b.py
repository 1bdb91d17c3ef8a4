"""Eager 1F1B: 1F1B with one more warm-up forward a hop (Zhuang et al., arXiv 2211.05322).

Under plain 1F1B two neighbours wait for each other's last tensor: a steady microbatch takes a forward, a backward and
2 (p - 1) / p transfers. Here a tensor is in flight while its receiver computes with the one before. p = 4,
8 microbatches, a backward takes two slots, a transfer one::

    slot    |0             |5             |10            |15            |20            |25
    rank 0  F0 F1 F2 F3 F4 F5 F6 .  .  .  .  .  .  .  .  .  B0 B0 F7 B1 B1 .  B2 B2 .  B3 B3 .  B4 B4
    rank 1  .  .  F0 F1 F2 F3 F4 .  .  .  .  .  .  B0 B0 F5 B1 B1 F6 B2 B2 F7 B3 B3 .  B4 B4 .  B5 B5
    rank 2  .  .  .  .  F0 F1 F2 .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3 F6 B4 B4 F7 B5 B5 .  B6 B6
    rank 3  .  .  .  .  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5 F6 B6 B6 F7 B7 B7

    slot    |30            |35
    rank 0  .  B5 B5 .  B6 B6 .  B7 B7
    rank 1  .  B6 B6 .  B7 B7 .  .  .
    rank 2  .  B7 B7 .  .  .  .  .  .
    rank 3  .  .  .  .  .  .  .  .  .

    F forward, B backward, . bubble

At most 2 (p - s) - 1 microbatches are in flight on stage s, nearly twice as many as under 1F1B.
"""

from nxdpp.schedules.actions import Action
from nxdpp.schedules.families.family import Family, each_rank
from nxdpp.schedules.families.one_forward_one_backward import alternate
from nxdpp.schedules.placement import Placement


def _rank(placement: Placement, rank: int, microbatches: int) -> list[Action]:
    return alternate(rank, 2 * (placement.ranks - rank - 1), microbatches)


EAGER_1F1B = Family("1f1b-eager", "1F1B with one more forward ahead a hop: hides transfers", each_rank(_rank))
