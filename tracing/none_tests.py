"""``if x is None`` where a module made ``x``: no traced value is ``None``, though what it stands for may be.

Python asks nobody when it compares with ``None``. So the spine's own code is followed instruction by instruction while
it is traced; before a local variable is compared, it is looked whether it stands for ``None`` with inputs of these
sizes, and the variable is set to that.
"""

import dis
import functools
import operator
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from torch import fx, nn

from nxdpp.tracing.errors import line_of
from nxdpp.tracing.opaque import record_opaque_call
from nxdpp.tracing.sizes import UnknownSizeError

_TORCH = re.compile(r"torch\b")


def is_none(value: Any) -> bool:
    """What is asked of a value that is compared with ``None``."""
    return value is None


def expect_not_none(value: Any, place: str) -> Any:
    """``value``, which was taken not to be ``None`` at ``place`` when the code there was traced."""
    if value is None:
        raise RuntimeError(
            f"a value that is compared with None is None, and was taken not to be when the model was traced\n"
            f"  at {place}\n"
            f"Make the module that holds this line a leaf (leaf_module_cls), or the function a single node "
            f"(autowrap_functions)."
        )
    return value


@contextmanager
def answered_none_tests(tracer: Any, files: Collection[str]) -> Iterator[None]:
    """Answer comparisons of local variables with ``None`` in the functions written in ``files``.

    A debugger's or a coverage tool's trace function is put back afterwards.
    """

    def follow(frame: FrameType, event: str, argument: Any) -> Any:
        if event != "call" or frame.f_code.co_filename not in files or not compared_with_none(frame.f_code):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return answer

    def answer(frame: FrameType, event: str, argument: Any) -> Any:
        name = compared_with_none(frame.f_code).get(frame.f_lasti) if event == "opcode" else None
        value = frame.f_locals.get(name) if name is not None else None
        if isinstance(value, fx.Proxy) and _may_be_none(value.node, tracer.root):
            _answer(tracer, frame, str(name), value)
        return answer

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        yield
    finally:
        sys.settrace(before)


@functools.cache
def compared_with_none(code: CodeType) -> dict[int, str]:
    """The variables of ``code`` that are compared with ``None``, by the offset at which each is read for it."""
    instructions = list(dis.get_instructions(code))
    found = {}
    for first, second, third in zip(instructions, instructions[1:], [*instructions[2:], None], strict=False):
        jumps = second.opname.startswith("POP_JUMP") and "NONE" in second.opname
        compares = second.opname == "LOAD_CONST" and second.argval is None and third and third.opname == "IS_OP"
        if (
            first.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
            and isinstance(first.argval, str)
            and (jumps or compares)
        ):
            found[first.offset] = first.argval
    return found


def _answer(tracer: Any, frame: FrameType, name: str, value: fx.Proxy) -> None:
    try:
        if tracer.fact(value.node, is_none):
            frame.f_locals[name] = None
    except UnknownSizeError:
        value.node = record_opaque_call(expect_not_none, (value, line_of(frame)), {}).node


def _may_be_none(node: fx.Node, root: nn.Module) -> bool:
    """Whether ``node`` is what a module returned, or an item of it: anything else, and what torch's own modules
    return, is a tensor."""
    while node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op == "call_module" and not _TORCH.match(type(root.get_submodule(str(node.target))).__module__)
