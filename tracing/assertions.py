"""``assert`` about data in the spine: taken to be true while tracing, and checked each time the graph runs."""

import dis
from types import FrameType
from typing import Any

from torch import fx

_RAISES = ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")


def check_assertion(value: Any, where: str) -> None:
    """Raise ``AssertionError`` unless ``value`` is true."""
    if not value:
        raise AssertionError(f"an assertion of the model about its data does not hold, at {where}")


def is_assertion(node: fx.Node) -> bool:
    """Whether ``node`` is there for its check alone, and has no value that anything needs."""
    return node.op == "call_function" and node.target is check_assertion


def asserts(frame: FrameType) -> bool:
    """Whether ``frame`` asks for the truth of a value in order to assert it."""
    instructions = list(dis.get_instructions(frame.f_code))
    position = next(i for i, instruction in enumerate(instructions) if instruction.offset == frame.f_lasti)
    jump = instructions[position]
    if "JUMP" not in jump.opname:
        return False
    if "IF_TRUE" in jump.opname:
        return instructions[position + 1].opname in _RAISES
    return any(other.offset == jump.argval and other.opname in _RAISES for other in instructions)


def record_assertion(proxy: fx.Proxy, frame: FrameType) -> None:
    """Add a node that checks that ``proxy`` is true, for the line of ``frame``."""
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
    proxy.tracer.create_proxy("call_function", check_assertion, (proxy, where), {})
