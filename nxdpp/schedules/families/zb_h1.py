"""ZB-H1: 1F1B with a split backward, in the memory of 1F1B (Qi et al., Zero Bubble, arXiv 2401.10241).

p = 4, 8 microbatches::

    slot    |0             |5             |10            |15            |20            |25
    rank 0  F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
    rank 1  .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
    rank 2  .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
    rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7

    F forward, I input-gradient, W weight-gradient, . bubble

Rank r delays its weight-gradients by r microbatches; they fill the bubble at the end. Every rank holds p microbatches.
The bubble is (p - 1) (F + I - W), and 1F1B's (p - 1) (F + I + W).
"""

from nxdpp.schedules.actions import Action
from nxdpp.schedules.families.delayed_weights import delay_weights
from nxdpp.schedules.families.family import Family, each_rank
from nxdpp.schedules.placement import Placement


def _rank(placement: Placement, rank: int, microbatches: int) -> list[Action]:
    forwards = [(0, microbatch) for microbatch in range(microbatches)]
    return delay_weights([rank], forwards, warm_up=placement.ranks - rank, delay=rank)


ZB_H1 = Family("zb-h1", "1F1B with split backward, in 1F1B's memory", each_rank(_rank))
