"""ZB-V: two chunks per rank in a V, nearly no bubble, in the memory of 1F1B (Qi et al., arXiv 2401.10241, section 6).

p = 4, 8 microbatches::

    slot    |0             |5             |10            |15            |20            |25
    rank 0  f0 f1 f2 f3 f4 f5 f6 F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 f7 i0 w0 F4 I4 W4 i1 w1 F5 I5 W5
    rank 1  .  f0 f1 f2 f3 f4 F0 f5 F1 I0 W0 F2 I1 W1 F3 I2 W2 f6 i0 w0 F4 I3 W3 f7 i1 w1 F5 I4 W4 i2
    rank 2  .  .  f0 f1 f2 F0 f3 F1 f4 F2 I0 W0 F3 I1 W1 f5 i0 w0 F4 I2 W2 f6 i1 w1 F5 I3 W3 f7 i2 w2
    rank 3  .  .  .  f0 F0 f1 F1 f2 F2 f3 F3 I0 W0 f4 i0 w0 F4 I1 W1 f5 i1 w1 F5 I2 W2 f6 i2 w2 F6 I3

    slot    |30            |35            |40            |45            |50
    rank 0  i2 w2 F6 I6 W6 i3 w3 F7 I7 W7 i4 w4 i5 w5 i6 w6 i7 w7 .  .  .
    rank 1  w2 F6 I5 W5 i3 w3 F7 I6 W6 i4 I7 i5 w4 i6 w5 i7 w6 W7 w7 .  .
    rank 2  F6 I4 W4 i3 w3 F7 I5 W5 i4 I6 i5 I7 i6 w4 i7 w5 W6 W7 w6 w7 .
    rank 3  W3 f7 i3 w3 F7 I4 W4 i4 I5 i5 I6 i6 I7 i7 w4 W5 W6 W7 w5 w6 w7

    F forward, I input-gradient, W weight-gradient, . bubble, small letters: first chunk of a rank

The first rank has the first stage and the loss. Rank r

1. warms up with 2 (p - r) - 1 forwards of the first chunk;
2. alternates forwards of the second and the first chunk, r times;
3. runs forward, input-gradient and weight-gradient of the second chunk, p - r times;
4. runs all three of both chunks in turn while forwards are left;
5. drains input-gradients; the delayed weight-gradients fill the bubble.

At most p microbatches are in flight, counted in full ranks. With F = I = W and at least 2 p - 1 microbatches, a rank
waits for p - 1 chunks in all. For fewer microbatches the schedule of 2 p - 1 is built, and the others are left out.
Phases and their lengths are as in ``torch.distributed.pipelining.ScheduleZBVZeroBubble``.
"""

from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.families.family import Family, each_rank
from nxdpp.schedules.placement import Placement


class _Chunk:
    """One chunk's actions of each kind, each in the order of the microbatches."""

    def __init__(self, stage: int, microbatches: int) -> None:
        kinds = (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
        each = [iter([Action(stage, kind, microbatch) for microbatch in range(microbatches)]) for kind in kinds]
        self.forward, self.input_gradient, self.weight_gradient = each


def _rank(placement: Placement, rank: int, microbatches: int) -> list[Action]:
    ranks = placement.ranks
    count = max(microbatches, 2 * ranks - 1)
    first, second = (_Chunk(stage, count) for stage in placement.stages_of(rank))
    both_forwards = [second.forward, first.forward]
    turn = [second.forward, second.input_gradient, second.weight_gradient]
    steady = [first.forward, first.input_gradient, first.weight_gradient, *turn]
    # The forwards of the first chunk that are left after warm-up and alternation.
    full_rounds = count - (2 * (ranks - rank) - 1) - rank
    plan = [
        ([first.forward], 2 * (ranks - rank) - 1),
        (both_forwards, rank),
        (turn, ranks - rank),
        (steady, full_rounds),
        (steady[1:], ranks - rank - 1),
        ([first.input_gradient, second.input_gradient], rank),
        ([first.input_gradient, first.weight_gradient], ranks - rank),
        ([second.weight_gradient], rank),
        ([first.weight_gradient], rank),
    ]
    actions = [next(kind) for kinds, times in plan for _ in range(times) for kind in kinds]
    return actions if count == microbatches else [action for action in actions if action.microbatch < microbatches]


ZB_V = Family(
    "zb-v", "two chunks in a V, nearly no bubble, in 1F1B's memory", each_rank(_rank), default_chunks=2, v_shaped=True
)
