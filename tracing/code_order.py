"""Order in which the code of a module above layers uses its parts, for parts that no graph holds."""

import dis
import inspect
from collections.abc import Iterator
from types import FunctionType

from torch import nn
from transformers import PreTrainedModel

_LOADS = ("LOAD_ATTR", "LOAD_METHOD")


def parts_in_order(module: nn.Module) -> list[str]:
    """Return the names of the children and parameters of ``module`` that the code of its ``forward`` uses.

    They are in the order of their first use, also in the methods of ``module`` that ``forward`` calls. A read of an
    attribute of a child (``self.model.embed_tokens``) is no use of the child.
    """
    parts = {*module._modules, *module._parameters}
    return list(dict.fromkeys(_used(type(module), type(module).forward, parts, frozenset())))


def _used(cls: type[nn.Module], function: object, parts: set[str], seen: frozenset[str]) -> Iterator[str]:
    function = inspect.unwrap(function) if callable(function) else None
    if not isinstance(function, FunctionType) or not function.__code__.co_argcount:
        return
    for name in _reads_of_self(function):
        if name in parts:
            yield name
        elif name not in seen and _is_own(cls, name):
            yield from _used(cls, getattr(cls, name), parts, seen | {name})


def _reads_of_self(function: FunctionType) -> Iterator[str]:
    """Yield the attributes of ``self`` that ``function`` reads. One that it calls has the place of the call.

    ``self.body(self.embed(x))`` loads ``body`` first, and calls it last.
    """
    own = function.__code__.co_varnames[0]
    instructions = list(dis.get_instructions(function))
    reads = []
    for index, (before, load, after) in enumerate(zip(instructions, instructions[1:], instructions[2:], strict=False)):
        if load.opname in _LOADS and after.opname not in _LOADS and _loads(before, own):
            calls = (place for place in range(index + 2, len(instructions)) if _begins_at(instructions[place], load))
            reads.append((next(calls, index), str(load.argval)))
    for _, name in sorted(reads, key=lambda read: read[0]):
        yield name


def _begins_at(call: dis.Instruction, load: dis.Instruction) -> bool:
    """Return whether ``call`` calls an expression that begins where that of ``load`` does."""
    here, there = call.positions, load.positions
    if not call.opname.startswith("CALL") or here is None or there is None or here.col_offset is None:
        return False
    return (here.lineno, here.col_offset) == (there.lineno, there.col_offset)


def _is_own(cls: type[nn.Module], name: str) -> bool:
    """Return whether ``name`` is a method of a model's code. The common ones of its bases use no part in order."""
    method = getattr(cls, name, None)
    return isinstance(method, FunctionType) and getattr(PreTrainedModel, name, None) is not method


def _loads(instruction: dis.Instruction, variable: str) -> bool:
    # Newer versions of Python load two variables at once.
    loaded = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    is_load = instruction.opname.startswith("LOAD_FAST") or instruction.opname == "LOAD_DEREF"
    return is_load and bool(loaded) and loaded[-1] == variable
