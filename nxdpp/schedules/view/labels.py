"""Labels and colours of actions: a hue for each kind, a shade for each chunk, both under dark letters.

The hues are apart for readers with any kind of colour blindness, the shades in lightness.
"""

from collections.abc import Sequence
from dataclasses import replace
from string import ascii_lowercase

from nxdpp.schedules.actions import COMPUTE, Action, ActionKind
from nxdpp.schedules.simulate import Span, Timeline

NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRADIENT: "input-gradient",
    ActionKind.WEIGHT_GRADIENT: "weight-gradient",
    **dict.fromkeys((ActionKind.GATHER, ActionKind.GATHERED), "gather"),
    **dict.fromkeys((ActionKind.REDUCE, ActionKind.REDUCED), "reduction"),
    ActionKind.RESHARD: "exchange",
    **dict.fromkeys((ActionKind.AVERAGE, ActionKind.AVERAGED), "average"),
    **dict.fromkeys((ActionKind.SUM_TIES, ActionKind.SUM_SEQUENCE), "sum"),
}

# Chunks of a rank whose labels a legend shows one by one.
_SHOWN = 4


def drawn(timeline: Timeline) -> Timeline:
    """Return ``timeline`` with what a drawing shows: of exchanges only what no computation hides."""
    shown = [[s for s in spans if s.action.kind in COMPUTE or s.end > s.start] for spans in timeline.spans]
    return replace(timeline, spans=shown)


class Labels:
    """Labels of the actions of a timeline: the first letter of the kind, the microbatch, and the chunk of the rank.

    Of one chunk per rank there is no mark. Of two, the first has small letters: ``f3``, ``F3``. Of more, each has a
    letter at the end: ``F3a``, ``F3b``, ``F3c``.
    """

    def __init__(self, ranks: Sequence[Sequence[Span]]) -> None:
        stages = [sorted({span.action.stage for span in spans}) for spans in ranks]
        self._chunks = {stage: chunk for of_rank in stages for chunk, stage in enumerate(of_rank)}
        self.chunks = max(map(len, stages))
        found = {span.action.kind for spans in ranks for span in spans}
        # One of each name.
        self.kinds = list({NAMES[kind]: kind for kind in NAMES if kind in found}.values())
        self.widest = max(len(self.label(span.action)) for spans in ranks for span in spans)

    def chunk(self, action: Action) -> int:
        """Return the place of the action's stage among the stages of its rank."""
        return self._chunks[action.stage]

    def label(self, action: Action) -> str:
        """Return the label of an action."""
        return self.of(action.kind, self.chunk(action), action.microbatch)

    def of(self, kind: ActionKind, chunk: int, microbatch: int = 0) -> str:
        """Return the label of a kind, chunk and microbatch."""
        letter = NAMES[kind][0]
        if self.chunks <= 2:
            return f"{letter if chunk < self.chunks - 1 else letter.upper()}{microbatch}"
        return f"{letter.upper()}{microbatch}{_letters(chunk)}"

    def shown(self) -> list[int]:
        """Return the chunks whose labels a legend shows: all, or the first two and the last."""
        return list(range(self.chunks)) if self.chunks <= _SHOWN else [0, 1, self.chunks - 1]

    def legend(self) -> str | None:
        """Return the meaning of the marks of chunks; ``None`` without any."""
        if self.chunks == 1:
            return None
        if self.chunks == 2:
            return "small letters: first chunk of a rank"
        return f"a to {_letters(self.chunks - 1)}: chunk of a rank"


def _letters(chunk: int) -> str:
    """Return ``a`` to ``z``, then ``aa``, ``ab``, ..."""
    text = ""
    chunk += 1
    while chunk:
        chunk, letter = divmod(chunk - 1, len(ascii_lowercase))
        text = ascii_lowercase[letter] + text
    return text


# Red, green and blue from 0 to 255: the first chunk of several, and the last or only one.
_Colour = tuple[int, int, int]
_ENDS: dict[ActionKind, tuple[_Colour, _Colour]] = {
    ActionKind.FORWARD: ((199, 220, 255), (55, 134, 227)),
    ActionKind.BACKWARD: ((235, 222, 168), (216, 132, 13)),
    ActionKind.INPUT_GRADIENT: ((191, 255, 213), (0, 163, 117)),
    ActionKind.WEIGHT_GRADIENT: ((250, 190, 210), (205, 91, 184)),
}
_EXCHANGE = ((254, 254, 254), (176, 176, 176))
# Letters on all of them.
INK = "#101418"


def shade(kind: ActionKind, chunk: int, chunks: int) -> str:
    """Return the colour of a kind for one of ``chunks`` chunks, as ``#rrggbb``."""
    light, full = _ENDS.get(kind, _EXCHANGE)
    part = 1.0 if chunks == 1 else chunk / (chunks - 1)
    mixed = (round(a + part * (b - a)) for a, b in zip(light, full, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)
