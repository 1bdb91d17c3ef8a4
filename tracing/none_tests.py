"""Comparisons with ``None`` that code makes of a value it is about to get, found in its bytecode.

::

    hidden, mask = self.encoder(x)              stored under names
    if mask is not None: ...                    a test of such a name
    found = self.find(hidden)
    keep(found)                                 found goes elsewhere: a test in keep counts, and one of an expression

Instructions differ between Python 3.11, 3.12 and 3.13.
"""

import dis
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType, FunctionType
from typing import Any

from nxdpp.tracing.code_names import is_framework, names_in
from nxdpp.tracing.errors import is_machinery

_SKIPPED = ("CACHE", "EXTENDED_ARG", "NOP", "COPY", "PRECALL")
# The module whose code calls that of the model.
_END = "nxdpp.tracing.trace"
_JUMPS = ("_IF_NONE", "_IF_NOT_NONE")


@dataclass(frozen=True)
class _NoneTests:
    """Names of variables that a function compares with ``None``; ``True`` if it compares another expression."""

    names: frozenset[str]
    has_others: bool


def may_be_tested(frame: FrameType | None, item: Any) -> bool:
    """Return whether the value of the running instruction of ``frame`` may be compared with ``None``.

    ``frame`` may run code of a library, above which the model's own code is looked for. ``item`` is the number of the
    value where the instruction unpacks several. A value that goes elsewhere may be compared there: in the code of the
    user that called this, and in functions that this names.
    """
    while frame is not None and is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return False
    code = frame.f_code
    stored = _destinations(code, frame.f_lasti, item)
    tests = _tests(code)
    if stored is None:
        return True
    if stored & tests.names:
        return True
    if stored and not any(name in _loaded(code) for name in stored):
        return False
    return not is_framework(frame.f_globals.get("__name__")) and any(map(_tests_a_local, _codes_around(frame)))


def _destinations(code: CodeType, offset: int, item: Any) -> set[str] | None:
    """Names under which the value of the instruction at ``offset`` is stored; ``None`` if it is tested at once."""
    instructions = list(dis.get_instructions(code))
    following = [each for each in instructions if each.offset > offset and each.opname not in _SKIPPED]
    stored: list[str] = []
    for number, each in enumerate(following):
        if _is_test(following, number):
            return None
        if each.opname == "LOAD_CONST" and each.argval is None:
            continue
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        if each.opname == "STORE_FAST_LOAD_FAST":
            names = names[:1]
        elif each.opname == "POP_TOP":
            names = ("",)
        elif not each.opname.startswith("STORE_FAST") and each.opname not in ("STORE_DEREF", "STORE_NAME"):
            break
        stored += names
        if each.opname == "STORE_FAST_LOAD_FAST":
            break
    is_unpacked = any(each.offset == offset and each.opname.startswith("UNPACK") for each in instructions)
    if is_unpacked and isinstance(item, int) and item < len(stored):
        return {stored[item]}
    return set(stored)


@lru_cache(256)
def _tests(code: CodeType) -> _NoneTests:
    kept = [each for each in dis.get_instructions(code) if each.opname not in _SKIPPED]
    names: set[str] = set()
    has_others = False
    for number in range(1, len(kept)):
        if not _is_test(kept, number):
            continue
        operand = kept[number - 1]
        if operand.opname == "LOAD_CONST":
            operand = kept[number - 2]
        if operand.opname.startswith(("LOAD_FAST", "STORE_FAST", "LOAD_DEREF", "LOAD_NAME")):
            names.add(operand.argval[-1] if isinstance(operand.argval, tuple) else operand.argval)
        else:
            has_others = True
    return _NoneTests(frozenset(names), has_others)


def _is_test(instructions: list[dis.Instruction], number: int) -> bool:
    each, before = instructions[number], instructions[max(number - 1, 0)]
    if each.opname.endswith(_JUMPS):
        return True
    compares = each.opname in ("IS_OP", "COMPARE_OP")
    return compares and before.opname == "LOAD_CONST" and before.argval is None


@lru_cache(256)
def _loaded(code: CodeType) -> frozenset[str]:
    names: set[str] = set()
    for each in dis.get_instructions(code):
        if "LOAD_" in each.opname and isinstance(each.argval, str):
            names.add(each.argval)
        elif "LOAD_" in each.opname and isinstance(each.argval, tuple):
            names.update(each.argval)
    return frozenset(names)


def _codes_around(frame: FrameType) -> Iterator[tuple[CodeType, bool]]:
    """The code of the user that runs, and functions that the innermost names; ``True`` for these."""
    around: FrameType | None = frame
    while around is not None and around.f_globals.get("__name__") != _END:
        if not is_framework(around.f_globals.get("__name__")):
            yield around.f_code, False
        around = around.f_back
    owner = type(frame.f_locals.get("self"))
    for name in names_in(frame.f_code):
        function = frame.f_globals.get(name, getattr(owner, name, None))
        if isinstance(function, FunctionType) and not is_framework(function.__module__):
            yield function.__code__, True


def _tests_a_local(found: tuple[CodeType, bool]) -> bool:
    """Return whether code tests an expression or a variable that may have the value."""
    code, is_called = found
    tests = _tests(code)
    # The parameters of running code had their values before.
    before = set() if is_called else set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    return tests.has_others or bool(tests.names - before)
