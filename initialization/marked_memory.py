"""Memory that is made while values are made: what was there before is not taken for values."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nxdpp.initialization.values import mark

aten = torch.ops.aten
_MAKE_UNWRITTEN = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


class MarkedMemory(TorchDispatchMode):
    """While entered, tensors of ``torch.empty`` and the like (``Module.to_empty``) are unwritten, see ``values``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _MAKE_UNWRITTEN and not result.is_meta:
            mark(result)
        return result
