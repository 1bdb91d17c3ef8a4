"""DualPipeV: DualPipe cut in half, two chunks per rank in a V (DeepSeek-AI, arXiv 2412.19437).

p = 4, 8 microbatches; a full backward takes two slots::

    slot    |0             |5             |10            |15            |20            |25
    rank 0  f0 f1 f2 f3 f4 f5 f6 F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 f7 B3 B3 F4 b0 b0 B4 B4 F5 .  b1 b1 B5
    rank 1  .  f0 f1 f2 f3 f4 F0 f5 F1 I0 W0 F2 I1 W1 F3 f6 B2 B2 F4 b0 b0 f7 B3 B3 F5 b1 b1 B4 B4 F6
    rank 2  .  .  f0 f1 f2 F0 f3 F1 f4 F2 I0 W0 F3 f5 B1 B1 F4 b0 b0 f6 B2 B2 F5 b1 b1 f7 B3 B3 F6 b2
    rank 3  .  .  .  f0 F0 f1 F1 f2 F2 f3 F3 f4 B0 B0 F4 b0 b0 f5 B1 B1 F5 b1 b1 f6 B2 B2 F6 b2 b2 f7

    slot    |30            |35            |40            |45            |50
    rank 0  B5 F6 .  b2 b2 B6 B6 F7 .  b3 b3 B7 B7 i4 w4 i5 w5 i6 w6 i7 w7
    rank 1  .  b2 b2 B5 B5 F7 .  b3 b3 B6 B6 b4 b4 I7 i5 W7 i6 w5 i7 w6 w7
    rank 2  b2 B4 B4 F7 .  b3 b3 B5 B5 b4 b4 B6 B6 i5 I7 i6 w5 i7 W7 w6 w7
    rank 3  B3 B3 F7 b3 b3 B4 B4 b4 b4 B5 B5 b5 b5 I6 i6 I7 i7 W6 w6 W7 w7

    F forward, B backward, I input-gradient, W weight-gradient, . bubble, small letters: first chunk of a rank

The first rank has the first stage and the loss. Rank r

1. warms up with 2 (p - r - 1) forwards of the first chunk;
2. runs a forward of the first and of the second chunk, r + 1 times;
3. runs input-gradient, weight-gradient and forward of the second chunk, p - r - 1 times;
4. alternates forwards and full backwards of both chunks while forwards of the first chunk are left;
5. runs backward, forward of the second chunk and backward of the first, p - r - 1 times;
6. drains the backwards of both chunks, r + 1 times; the last r + 1 of them are split, and their weight-gradients wait;
7. runs the oldest waiting weight-gradient and an input-gradient of the first chunk, p - r - 1 times;
8. runs the waiting weight-gradients.

Most backwards are full, unlike in ZB-V: they need no second pass over the graph. On devices that exchange tokens
between experts, a forward and the backward after it, in steps 4 and 5, hide each other's exchange. Both go down the
ranks, or both up. At most p + 1/2 microbatches are in flight, counted in full ranks. For fewer than 2 p microbatches
the schedule of 2 p is built, and the others are left out.
"""

from collections import deque

from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.families.family import Family, each_rank
from nxdpp.schedules.placement import Placement


class _Rank:
    """The actions of a rank so far, and its weight-gradients that wait, the oldest first."""

    def __init__(self, first: int, second: int) -> None:
        self.actions: list[Action] = []
        self._stages = (first, second)
        self._forwards = [0, 0]
        self._backwards = [0, 0]
        self._waiting: deque[Action] = deque()

    def forward(self, chunk: int) -> None:
        self.actions.append(Action(self._stages[chunk], ActionKind.FORWARD, self._forwards[chunk]))
        self._forwards[chunk] += 1

    def backward(self, chunk: int, split: bool = False) -> None:
        """Run the next backward of ``chunk``; if ``split``, its weight-gradient waits."""
        stage, microbatch = self._stages[chunk], self._backwards[chunk]
        kind = ActionKind.INPUT_GRADIENT if split else ActionKind.BACKWARD
        self.actions.append(Action(stage, kind, microbatch))
        self._backwards[chunk] += 1
        if split:
            self._waiting.append(Action(stage, ActionKind.WEIGHT_GRADIENT, microbatch))

    def weight_gradient(self) -> None:
        self.actions.append(self._waiting.popleft())


def _rank(placement: Placement, rank: int, microbatches: int) -> list[Action]:
    behind = placement.ranks - rank - 1
    count = max(microbatches, 2 * placement.ranks)
    run = _Rank(*placement.stages_of(rank))
    # Warm-up: steps 1 to 3.
    for _ in range(2 * behind):
        run.forward(0)
    for _ in range(rank + 1):
        run.forward(0)
        run.forward(1)
    for _ in range(behind):
        run.backward(1, split=True)
        run.weight_gradient()
        run.forward(1)
    # Steady: steps 4 and 5.
    for _ in range(count - 2 * placement.ranks + rank + 1):
        run.forward(0)
        run.backward(1)
        run.forward(1)
        run.backward(0)
    for _ in range(behind):
        run.backward(1)
        run.forward(1)
        run.backward(0)
    # Drain: steps 6 to 8.
    for done in range(2 * (rank + 1)):
        run.backward(1 - done % 2, split=done > rank)
    for _ in range(behind):
        run.weight_gradient()
        run.backward(0, split=True)
    for _ in range(rank + 1):
        run.weight_gradient()
    return [action for action in run.actions if action.microbatch < microbatches]


DUALPIPE_V = Family(
    "dualpipe-v",
    "two chunks in a V, full backwards but in the drain",
    each_rank(_rank),
    default_chunks=2,
    v_shaped=True,
    overlaps=True,
)
