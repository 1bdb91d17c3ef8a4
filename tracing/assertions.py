"""``assert`` of a traced value, between layers: a node of the graph, which asks when it runs."""

import dis
from itertools import islice
from types import FrameType
from typing import Any

from torch import fx

from nxdpp.tracing.errors import line_of

_JUMPS = ("POP_JUMP_IF_TRUE", "POP_JUMP_FORWARD_IF_TRUE")
_BETWEEN = ("COPY", "TO_BOOL", "NOT_TAKEN")


def check_assertion(holds: Any, place: str) -> None:
    """Raise ``AssertionError`` unless ``holds``, which the model asserts at ``place``. A tensor on a GPU is waited
    for, as in the model itself."""
    if not holds:
        raise AssertionError(f"what the model asserts does not hold\n  at {place}")


def record_assertion(condition: fx.Proxy, asker: FrameType) -> bool:
    """Whether ``asker`` asks for the truth of ``condition`` in order to assert it; a node that checks it is made."""
    if not _asserts(asker):
        return False
    place = line_of(asker)
    condition.tracer.create_proxy("call_function", check_assertion, (condition, place), {})
    return True


def is_assertion(node: fx.Node) -> bool:
    """Whether ``node`` is one that ``record_assertion`` made; it has no result, and is to run all the same."""
    return node.target is check_assertion


def _asserts(frame: FrameType) -> bool:
    instructions = (i for i in dis.get_instructions(frame.f_code) if i.offset >= frame.f_lasti)
    following = [i for i in islice(instructions, 4) if i.opname not in _BETWEEN]
    if len(following) < 2 or following[0].opname not in _JUMPS:
        return False
    loaded = following[1]
    return loaded.opname == "LOAD_ASSERTION_ERROR" or "AssertionError" in loaded.argrepr
