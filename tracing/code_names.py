"""Names in code objects: attributes and globals that code may reach."""

import dis
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from types import CodeType

_FRAMEWORKS = re.compile(r"(torch|transformers|numpy|nxdpp|builtins|einops|einx)(\.|$)")
# A trace asks again and again for the same code.
_KEPT = 1 << 14


@lru_cache(_KEPT)
def is_framework(module: str | None) -> bool:
    """Return whether a Python module is of torch, transformers, NumPy, nxdpp or the standard library."""
    name = module or ""
    return bool(_FRAMEWORKS.match(name)) or name.partition(".")[0] in sys.stdlib_module_names


@lru_cache(_KEPT)
def names_in(code: CodeType) -> frozenset[str]:
    """Names of globals and attributes in ``code`` and the functions inside, and its strings."""
    return frozenset({*code.co_names, *_in_constants(code, names_in)})


def names_on_others(code: CodeType) -> frozenset[str]:
    """Names of attributes that ``code`` reads of other objects than ``self``, and its strings."""
    # Equal code objects may have other qualified names.
    return _names_on_others(code, code.co_qualname.rpartition(".")[0])


@lru_cache(_KEPT)
def _names_on_others(code: CodeType, owner: str) -> frozenset[str]:
    is_method = bool(owner) and not owner.endswith("<locals>") and code.co_argcount > 0
    own = {"self", code.co_varnames[0]} if is_method else {"self"}
    names: set[str] = set()
    loads_self = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and not loads_self:
            names.add(instruction.argval)
        # Newer versions of Python load two variables at once.
        loaded = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        is_load = instruction.opname.startswith("LOAD_FAST") or instruction.opname == "LOAD_DEREF"
        loads_self = is_load and bool(loaded) and loaded[-1] in own
    return frozenset(names | _in_constants(code, names_on_others))


def _in_constants(code: CodeType, names_of: Callable[[CodeType], frozenset[str]]) -> set[str]:
    """Names in the strings among the constants of ``code``, and ``names_of`` the functions inside."""
    names: set[str] = set()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_of(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return names
