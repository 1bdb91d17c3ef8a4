"""Branches of running code that do nothing but raise, found in its bytecode.

::

    if x.isnan().any():                          asks ── true ──▶ ValueError("nan")         a branch that only raises
        raise ValueError("nan")                    └──── false ─▶ the code goes on

    if (x < 0).any() and x.max() > 5: raise ...  asks ── true ──▶ asks ── true ──▶ raises   a chain of questions
                                                   └──── false ────┴───── false ─▶ the code goes on

Instructions differ between Python 3.11, 3.12 and 3.13. Unknown ones end the search: the branch then does more.
"""

import builtins
import dis
import types
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

# Instructions that compute a value and change nothing that outlives the exception.
_QUIET = (
    "BINARY_", "BUILD_", "CALL", "COMPARE_OP", "CONTAINS_OP", "CONVERT_VALUE", "COPY", "DICT_", "END_FOR",
    "EXTENDED_ARG", "FORMAT_", "FOR_ITER", "GET_ITER", "IS_OP", "JUMP_", "KW_NAMES", "LIST_", "LOAD_", "MAKE_FUNCTION",
    "NOP", "NOT_TAKEN", "POP_JUMP_", "POP_TOP", "PRECALL", "PUSH_NULL", "SET_FUNCTION_ATTRIBUTE", "STORE_FAST", "SWAP",
    "TO_BOOL", "UNARY_",
)  # fmt: skip
_WITHOUT_EFFECT = ("EXTENDED_ARG", "JUMP_BACKWARD", "JUMP_FORWARD", "NOP", "NOT_TAKEN")


@dataclass(frozen=True)
class Raises:
    """The exception of a branch: its class and, if it is constant, its text."""

    error: type[Exception]
    text: str


@dataclass(frozen=True)
class Question:
    """A jump that depends on the truth of a value.

    Attributes:
        raises: the exceptions of branches that only raise, by the truth that leads there.
        chained: the truth that leads to further questions, after which the code raises, or goes on as for the other.
        inside: the offsets at which the code asks these.
    """

    raises: dict[bool, Raises]
    chained: bool | None
    inside: frozenset[int]


def question_of(frame: types.FrameType) -> Question | None:
    """The jump that ``frame`` decides now, ``None`` where it does something else with the truth of a value."""
    code = _Code.of(frame.f_code)
    branches = code.branches_at(frame.f_lasti)
    if branches is None:
        return None
    doomed = {truth: code.offsets_until_raise(start) for truth, start in branches.items()}
    raises = {truth: _raised(code, offsets, frame) for truth, offsets in doomed.items() if offsets}
    inside = {truth: code.offsets_until(start, branches[not truth]) for truth, start in branches.items()}
    chained = None if raises else next((truth for truth, offsets in inside.items() if offsets), None)
    return Question(raises, chained, inside[chained] if chained is not None else frozenset())


class _Code:
    """The instructions of a function by offset."""

    def __init__(self, code: types.CodeType) -> None:
        self.instructions = {instruction.offset: instruction for instruction in dis.get_instructions(code)}
        offsets = list(self.instructions)
        self._next = dict(pairwise(offsets))
        self._same_return = self._returns()
        self._handlers = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]  # missing in typeshed

    @staticmethod
    @lru_cache(128)
    def of(code: types.CodeType) -> "_Code":
        return _Code(code)

    def branches_at(self, offset: int) -> dict[bool, int] | None:
        """The offsets to which the truth asked at ``offset`` leads."""
        # A specialised call of Python 3.11 stays at its PRECALL.
        while self._calls_bool(offset) or self._asks_before_the_jump(self.instructions[offset]):
            offset = self._next[offset]
        instruction = self.instructions[offset]
        if not instruction.opname.startswith("POP_JUMP_") or not instruction.opname.endswith(("_TRUE", "_FALSE")):
            return None
        jumps_if = instruction.opname.endswith("_TRUE")
        return {jumps_if: self._settled(instruction.argval), not jumps_if: self._settled(self._next[offset])}

    def offsets_until_raise(self, start: int) -> list[int]:
        """The offsets of a branch of which every way ends in ``raise``; nothing for another one."""
        seen, raises = self._walk(start, None)
        return sorted(seen) if raises and all(self._leaves(offset) for offset in raises) else []

    def offsets_until(self, start: int, end: int) -> frozenset[int]:
        """The offsets of a branch of which every way ends in ``raise`` or at ``end``; nothing for another one."""
        seen, raises = self._walk(start, end)
        if not raises or not all(self._leaves(offset) for offset in raises):
            return frozenset()
        # A variable may be set only where the exception ends its life.
        stores = [offset for offset in seen if self.instructions[offset].opname.startswith("STORE_")]
        return frozenset(seen) if all(self.offsets_until_raise(offset) for offset in stores) else frozenset()

    def _walk(self, start: int, end: int | None) -> tuple[set[int], list[int]]:
        """Offsets from ``start``, and those of ``raise``; both empty if a way ends neither there nor at ``end``."""
        seen: set[int] = set()
        raises: list[int] = []
        pending = [start]
        while pending:
            offset = pending.pop()
            if offset in seen or offset == end:
                continue
            seen.add(offset)
            instruction = self.instructions[offset]
            if instruction.opname == "RAISE_VARARGS" and instruction.arg:
                raises.append(offset)
                continue
            if not instruction.opname.startswith(_QUIET) or self._drops_a_call(offset):
                return set(), []
            pending += self._following(instruction)
        return seen, raises

    def _following(self, instruction: dis.Instruction) -> list[int]:
        name = instruction.opname
        following = [] if name.startswith(("JUMP_FORWARD", "JUMP_BACKWARD")) else [self._next[instruction.offset]]
        if name.startswith(("JUMP_", "POP_JUMP_", "FOR_ITER")):
            following.append(instruction.argval)
        return [offset if name.startswith("FOR_ITER") else self._settled(offset) for offset in following]

    def _settled(self, offset: int) -> int:
        """The first offset from ``offset`` with an effect; one offset for all returns of one constant."""
        seen = set()
        while offset not in seen and self.instructions[offset].opname.startswith(_WITHOUT_EFFECT):
            seen.add(offset)
            instruction = self.instructions[offset]
            offset = instruction.argval if instruction.opname.startswith("JUMP_") else self._next[offset]
        return self._same_return.get(offset, offset)

    def _returns(self) -> dict[int, int]:
        first: dict[Any, int] = {}
        same: dict[int, int] = {}
        for offset, instruction in self.instructions.items():
            following = self.instructions.get(self._next.get(offset, -1))
            loads = instruction.opname == "LOAD_CONST" and following and following.opname == "RETURN_VALUE"
            if loads or instruction.opname == "RETURN_CONST":
                same[offset] = first.setdefault(instruction.argrepr, offset)
        return same

    def _drops_a_call(self, offset: int) -> bool:
        """Return whether a call is a statement of its own, such as ``self.log(x)``."""
        following = self._next.get(offset)
        is_call = self.instructions[offset].opname.startswith("CALL")
        return is_call and following is not None and self.instructions[following].opname == "POP_TOP"

    def _leaves(self, offset: int) -> bool:
        """Return whether an exception at ``offset`` meets no handler of the function but those of ``with``."""
        handlers = [entry.target for entry in self._handlers if entry.start <= offset < entry.end]
        return all(self.instructions[self._next[target]].opname == "WITH_EXCEPT_START" for target in handlers)

    @staticmethod
    def _asks_before_the_jump(instruction: dis.Instruction) -> bool:
        # From Python 3.13 on a comparison before a jump asks for the truth itself: dis prints "bool(>)".
        return instruction.opname == "TO_BOOL" or (
            instruction.opname == "COMPARE_OP" and instruction.argrepr.startswith("bool(")
        )

    def _calls_bool(self, offset: int) -> bool:
        call = self.instructions[offset]
        if not call.opname.startswith(("CALL", "PRECALL")) or call.positions is None:
            return False
        # The text of a call starts with the name of the function.
        begin = call.positions[0], call.positions[2]
        return any(
            loaded.argval == "bool" and loaded.positions is not None
            and (loaded.positions[0], loaded.positions[2]) == begin
            for loaded in self.instructions.values()
            if loaded.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        )  # fmt: skip


def _raised(code: _Code, offsets: list[int], frame: types.FrameType) -> Raises:
    instructions = [code.instructions[offset] for offset in offsets]
    loads = [i for i in instructions if i.opname.startswith(("LOAD_", "CALL", "FORMAT_", "BUILD_", "BINARY_"))]
    for index, load in enumerate(loads):
        error = _exception(load, frame)
        if error is not None:
            text, call = (*loads[index + 1 :], load, load)[:2]
            is_text = text.opname == "LOAD_CONST" and isinstance(text.argval, str) and call.opname.startswith("CALL")
            return Raises(error, text.argval if is_text else "")
    return Raises(RuntimeError, "")


def _exception(instruction: dis.Instruction, frame: types.FrameType) -> type[Exception] | None:
    if instruction.opname == "LOAD_ASSERTION_ERROR" or "AssertionError" in instruction.argrepr:
        return AssertionError
    if instruction.opname not in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF"):
        return None
    names: list[dict[str, Any]] = [frame.f_locals, frame.f_globals, vars(builtins)]
    value = next((space[instruction.argval] for space in names if instruction.argval in space), None)
    return value if isinstance(value, type) and issubclass(value, Exception) else None
