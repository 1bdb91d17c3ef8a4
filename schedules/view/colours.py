"""Colours of actions: a hue for each kind, a shade for each chunk, both under dark letters.

The hues are apart for readers with any kind of colour blindness, the shades in lightness.
"""

from nxdpp.schedules.actions import ActionKind

# Red, green and blue from 0 to 255: the first chunk of several, and the last or only one.
_Colour = tuple[int, int, int]
_ENDS: dict[ActionKind, tuple[_Colour, _Colour]] = {
    ActionKind.FORWARD: ((199, 220, 255), (55, 134, 227)),
    ActionKind.BACKWARD: ((235, 222, 168), (216, 132, 13)),
    ActionKind.INPUT_GRADIENT: ((191, 255, 213), (0, 163, 117)),
    ActionKind.WEIGHT_GRADIENT: ((250, 190, 210), (205, 91, 184)),
}
# Letters on all of them.
INK = "#101418"


def shade(kind: ActionKind, chunk: int, chunks: int) -> str:
    """Return the colour of a kind for one of ``chunks`` chunks, as ``#rrggbb``."""
    light, full = _ENDS[kind]
    part = 1.0 if chunks == 1 else chunk / (chunks - 1)
    mixed = (round(a + part * (b - a)) for a, b in zip(light, full, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)
