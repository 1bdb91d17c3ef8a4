"""Difference of two ranks' texts, for a message: the lines that decide others come first.

A different configuration makes different parameters and a different graph too. So a message shows one kind of lines::

    settings      num_microbatches: 4
    configuration configuration rms_norm_eps: 1e-06
    attributes    attribute layers.0.scale = 2.0
    parameters    parameter lm_head.weight: [61, 32] torch.float32
    values        values of lm_head.weight: 5e0c
    modes         requires_grad of lm_head.weight: False
    graph         stage 1: model_norm = call_module model.norm(...)
"""

from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import NamedTuple

_LINES_SHOWN = 4
_LINES_COMPARED = 100
# Longest line that a message shows whole.
_LINE = 200
# Characters that a message shows before the first difference of two long lines.
_BEFORE = 60
_NONE = "(no such line)"

_MODES = "other modes, which the code of forward reads,"
_HAS = {
    "settings": "other settings",
    "configuration": "another configuration",
    "attributes": "other attributes",
    "parameters": "other parameters",
    "values": "other parameters",
    "modes": _MODES,
    "graph": "another graph",
}
_STARTS = {
    "configuration ": "configuration",
    "attribute ": "attributes",
    "parameter ": "parameters",
    "buffer ": "parameters",
    "values of ": "values",
    "initial weights from ": "values",
    "requires_grad of ": "modes",
    "training of ": "modes",
    "stage ": "graph",
    "any stage: ": "graph",
}

# The start of a line, and the items in which it differs from the other line; all of a short line.
LinePart = tuple[str, str]


class Difference(NamedTuple):
    """One rank's side, such as ``"other settings"``, and the first differing lines of both with line breaks."""

    has: str
    lines: str

    @property
    def is_of_modes(self) -> bool:
        """``True`` if ``requires_grad`` or ``training`` differs, for which the code of forward asks."""
        return self.has == _MODES

    @property
    def is_of_graph(self) -> bool:
        """``True`` if the ranks have the same settings and the same model."""
        return self.has == _HAS["graph"]


def difference_of(there: str, theirs: Sequence[str], here: str, ours: Sequence[str]) -> Difference:
    """Return the first differences of two ranks' lines; ``there`` and ``here`` name the ranks."""
    for kind, has in _HAS.items():
        first, second = ([line for line in lines if _kind(line) == kind] for lines in (theirs, ours))
        if first != second:
            pairs = differing_lines(first, second) if kind == "graph" else differing_entries(first, second)
            return Difference(has, _shown(there, here, pairs))
    # The same lines, of different kinds, in a different order.
    return Difference(_HAS["graph"], _shown(there, here, differing_lines(theirs, ours)))


def differing_lines(theirs: Sequence[str], ours: Sequence[str]) -> list[tuple[str | None, str | None]]:
    """Pairs of lines that only one of two texts has; ``None`` in a pair means no line.

    Texts of the same lines in a different order are compared line by line.
    """
    pairs = list(zip_longest(_only_in(theirs, ours), _only_in(ours, theirs)))
    return pairs or [pair for pair in zip_longest(theirs, ours) if pair[0] != pair[1]]


def differing_entries(theirs: Sequence[str], ours: Sequence[str]) -> list[tuple[str | None, str | None]]:
    """Pairs of lines ``name: value`` of one name and of different values; ``None`` in a pair means no such name.

    Lines without a name, and lines of the same names in a different order, are compared as by ``differing_lines``.
    """
    there, here = ({_name(line): line for line in lines} for lines in (theirs, ours))
    if any(name == line for lines in (there, here) for name, line in lines.items()):
        return differing_lines(theirs, ours)
    both = [(there.get(name), here.get(name)) for name in {**there, **here}]
    return [pair for pair in both if pair[0] != pair[1]] or differing_lines(theirs, ours)


def _kind(line: str) -> str:
    return next((kind for start, kind in _STARTS.items() if line.startswith(start)), "settings")


def _name(line: str) -> str:
    return line.partition(" = " if line.startswith("attribute ") else ": ")[0]


def _only_in(lines: Sequence[str], others: Sequence[str]) -> list[str]:
    known = set(others)
    return [line for line in lines if line not in known]


def _shown(there: str, here: str, pairs: Sequence[tuple[str | None, str | None]]) -> str:
    parts = [differing_parts(*pair) for pair in pairs[:_LINES_COMPARED]]
    # Several functions may hold one configuration.
    distinct = {(theirs[1], ours[1]): (theirs, ours) for theirs, ours in reversed(parts)}
    found = [tuple(map("".join, both)) for both in reversed(distinct.values())]
    shown = "".join(f"  {there}: {theirs}\n  {here}: {ours}\n" for theirs, ours in found[:_LINES_SHOWN])
    more = len(found) - _LINES_SHOWN + max(0, len(pairs) - _LINES_COMPARED)
    return shown + (f"  and {more} more\n" if more > 0 else "")


def differing_parts(theirs: str | None, ours: str | None) -> tuple[LinePart, LinePart]:
    """The parts that differ between two lines, arguments of a call or the text around them; short lines are whole."""
    if theirs is None or ours is None:
        return _cut(theirs, 0), _cut(ours, 0)
    if max(len(theirs), len(ours)) <= _LINE:
        return ("", theirs), ("", ours)
    one, two = theirs.split(", "), ours.split(", ")
    if one[0] != two[0] or "(" not in one[0]:
        same = next(i for i, (a, b) in enumerate(zip_longest(theirs, ours)) if a != b)
        return _cut(theirs, same), _cut(ours, same)
    steps = SequenceMatcher(None, one, two, autojunk=False).get_opcodes()
    changed = [step for step in steps if step[0] != "equal"]
    starts = [f"{line.partition('(')[0][:_LINE]}(... " for line in (theirs, ours)]
    items = [
        ", ".join(item for _, a, b, _, _ in changed for item in one[a:b]),
        ", ".join(item for _, _, _, a, b in changed for item in two[a:b]),
    ]
    return _part(starts[0], items[0]), _part(starts[1], items[1])


def _cut(line: str | None, same: int) -> LinePart:
    """The characters of ``line`` around the first ones that differ, after ``same`` equal ones; its name is kept."""
    if line is None:
        return "", _NONE
    name = _name(line)
    begin = same - _BEFORE
    if begin <= len(name):
        return "", line[:_LINE] + ("..." if len(line) > _LINE else "")
    start = f"{name}: ..." if len(name) <= _LINE and name != line else "..."
    return start, line[begin : begin + _LINE] + ("..." if len(line) > begin + _LINE else "")


def _part(start: str, items: str) -> LinePart:
    return start, items[:_LINE] + ("..." if len(items) > _LINE else "") or "(without)"
