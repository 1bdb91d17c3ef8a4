"""``mask[...] if mask is not None else None``: whether a mask is ``None`` is known only when the graph runs.

transformers leaves a mask out where the attention kernel needs none, which depends on the padding. What is taken of a
mask is therefore taken when the graph runs, and is ``None`` of a mask that is ``None``, where the code says so.
"""

import linecache
import re
from types import FrameType
from typing import Any

from torch import fx

from nxdpp.tracing.opaque import OpaqueCall

MASK_MODULE = "transformers.masking_utils"
_UNLESS_NONE = re.compile(r"\s*if\s+(\w+)\s+is\s+not\s+None\s+else\s+None\s*(?=[,)\]}#]|for\b|$)")
_LINES_OF_A_CONDITION = 3


# Named as the operator whose place it takes.
def getitem(mask: Any, index: Any, place: str | None) -> Any:
    """``mask[index]``; of ``None`` it is ``None``, or ``RuntimeError`` where ``place`` is a line without that case."""
    if mask is not None:
        return mask[index]
    if place is None:
        return None
    raise RuntimeError(
        f"a mask is None, and was taken not to be when the model was traced\n  at {place}\nMake the module that holds "
        f"this line a leaf (leaf_module_cls), or the function a single node (autowrap_functions)."
    )


def is_mask(value: fx.Proxy) -> bool:
    """Whether ``value`` is a mask of transformers', which may be ``None``."""
    target = value.node.target
    return isinstance(target, OpaqueCall) and getattr(target.function, "__module__", "") == MASK_MODULE


def item_of_mask(mask: fx.Proxy, index: Any, caller: FrameType) -> fx.Proxy:
    """Record ``mask[index]`` of ``caller``, whose code was followed as if the mask was there.

    Where the whole of a mask is taken, code that makes ``None`` of ``None`` is right in both cases. For a part of it
    the code may have asked before, and gone another way.
    """
    place = None
    if not _is_whole(index) or not _makes_none_of_none(caller):
        code = caller.f_code
        place = f"{code.co_filename}:{caller.f_lineno}, in {code.co_name}"
    return mask.tracer.create_proxy("call_function", getitem, (mask, index, place), {})


def _is_whole(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(part, slice) and part in (slice(None), slice(0, None)) for part in parts)


def _makes_none_of_none(caller: FrameType) -> bool:
    """Whether the item that ``caller`` is taking stands in ``x[...] if x is not None else None``."""
    line, end_line, column, end_column = list(caller.f_code.co_positions())[caller.f_lasti // 2]
    if line is None or end_line is None or column is None or end_column is None:
        return False
    source = [linecache.getline(caller.f_code.co_filename, end_line + i) for i in range(_LINES_OF_A_CONDITION)]
    first = linecache.getline(caller.f_code.co_filename, line).encode()[column:].decode()
    rest = source[0].encode()[end_column:].decode() + "".join(source[1:])
    condition = _UNLESS_NONE.match(rest)
    return condition is not None and re.match(rf"{condition[1]}\s*\[", first) is not None
