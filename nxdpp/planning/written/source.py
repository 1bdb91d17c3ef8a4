"""Source text of calls: arguments on lines of their own where one line is too long, and names of layers folded."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH = 100
_FEW = 3
_NUMBERED = re.compile(r"(.*\.)(\d+)")


def call(function: str, first: Sequence[str], arguments: Mapping[str, Any]) -> str:
    """Return a call of ``function`` with the texts ``first`` and then named ``arguments``."""
    given = [*first, *(f"{name}={value_text(value)}" for name, value in arguments.items())]
    line = f"{function}({', '.join(given)})"
    if len(line) <= _WIDTH:
        return line
    return f"{function}(\n" + "".join(f"{_broken(each)},\n" for each in given) + ")"


def value_text(value: Any) -> str:
    """Return the source of ``value``; of a list of many numbered names an expression."""
    found = [_NUMBERED.fullmatch(each) for each in value] if isinstance(value, list) and len(value) > _FEW else [None]
    matches = [match for match in found if match is not None]
    if len(matches) < len(found) or len({match[1] for match in matches}) > 1:
        return repr(value)
    numbers = tuple(int(match[2]) for match in matches)
    step = numbers[1] - numbers[0]
    even = range(numbers[0], numbers[-1] + 1, max(step, 1))
    listed = repr(even) if tuple(even) == numbers else repr(numbers)
    return f'[f"{matches[0][1]}{{layer}}" for layer in {listed}]'


def _broken(text: str) -> str:
    """Return ``text`` as an argument on lines of its own."""
    return textwrap.fill(text, _WIDTH, initial_indent="    ", subsequent_indent="        ", break_long_words=False)
