"""Refusal of collectives and sends of XLA tensors.

gloo does not see their memory: ``torch.distributed`` would return them unchanged, without an error. torch's functional
collectives would be XLA's own, of one process, whatever the group.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NoReturn

import torch

from nxdpp.ground.torch_names import COLLECTIVES
from nxdpp.ground.xla_names import HAS_KERNEL, OPERATORS

# Operators with a kernel for one of these move tensors between ranks.
_KEYS = ("CPU", "XLA")
_NAMESPACES = ("c10d", COLLECTIVES.name)


@cache
def refuse_collectives() -> list[torch.library.Library]:
    """Make collectives and sends of ``torch.distributed`` raise ``RuntimeError`` for an XLA tensor, in this process.

    For other tensors they work as before. torch_xla's own backend does not call these operators. The refusals last as
    long as the result, which is kept.
    """
    return [_refused(namespace) for namespace in _NAMESPACES]


def _refused(namespace: str) -> torch.library.Library:
    library = torch.library.Library(namespace, "IMPL")
    for full_name in OPERATORS():
        of, _, name = full_name.partition("::")
        if of == namespace and any(map(partial(HAS_KERNEL, full_name), _KEYS)):
            library.impl(name, _refusal(name), "XLA", allow_override=True)
    return library


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **keywords: Any) -> NoReturn:
        raise RuntimeError(
            f"{name.strip('_')} of a tensor on an XLA device: gloo sends host memory alone, and would return it "
            f"unchanged without an error. Give a copy in host memory (tensor.cpu()), and copy the result back."
        )

    return refuse
