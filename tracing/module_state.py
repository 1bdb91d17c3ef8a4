"""What a traced ``forward`` does to its own modules must not stay, and must not be lost unsaid."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn


@contextmanager
def unchanged_modules(modules: list[nn.Module]) -> Iterator[None]:
    """Put back attributes and buffers of ``modules`` that were replaced by traced values, and raise for them.

    Raises ``RuntimeError`` naming the module's class and the attribute.
    """
    stores = [(module, store) for module in modules for store in (vars(module), module._buffers, module._parameters)]
    before = [dict(store) for _, store in stores]
    tensors = [(m, n, v, v._version) for m in modules for n, v in vars(m).items() if isinstance(v, torch.Tensor)]
    yield
    for module, name, tensor, version in tensors:
        if tensor._version != version:
            raise RuntimeError(
                f"forward changes {type(module).__name__}.{name}, a tensor that is neither buffer nor parameter, in "
                f"place; that would happen at tracing only. Make it a buffer of a module that changes it."
            )
    lost = []
    for (module, store), old in zip(stores, before, strict=True):
        for name in [name for name, value in store.items() if isinstance(value, fx.Proxy)]:
            lost.append(f"{type(module).__name__}.{name}")
            _put_back(store, name, old)
    if lost:
        raise RuntimeError(
            f"forward sets {', '.join(lost)} to a value that it computes; outside the transformer layers that would be "
            f"lost"
        )


def _put_back(store: dict[str, Any], name: str, old: dict[str, Any]) -> None:
    if name in old:
        store[name] = old[name]
    else:
        del store[name]
