"""Refusal of collectives and sends of XLA tensors.

gloo does not see their memory: ``torch.distributed`` would return them unchanged, without an error.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import torch

_NAMESPACE = "c10d"


@cache
def refuse_collectives() -> torch.library.Library:
    """Make collectives and sends of ``torch.distributed`` raise ``RuntimeError`` for an XLA tensor, in this process.

    Those of other tensors are as before. torch_xla's own backend does not call these operators. The refusals last as
    long as the result, which is kept.
    """
    library = torch.library.Library(_NAMESPACE, "IMPL")
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace == _NAMESPACE and torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CPU"):
            library.impl(name, _refusal(name), "XLA")
    return library


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **keywords: Any) -> NoReturn:
        raise RuntimeError(
            f"{name.strip('_')} of a tensor on an XLA device: gloo sends host memory alone, and would return it "
            f"unchanged without an error. Give a copy in host memory (tensor.cpu()), and copy the result back."
        )

    return refuse
