"""What a traced ``forward`` does to its own modules must not stay, and must not be lost unsaid."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn

_METADATA = frozenset({"device", "dtype"})


@contextmanager
def unchanged_modules(modules: list[nn.Module]) -> Iterator[None]:
    """Refuse traced values as attributes of ``modules``, but for an attribute of the module's own that is moved.

    ``self.table = self.table.to(x.device)`` is followed: what is lost is that the next step would find the table
    moved already. All attributes and buffers are as before afterwards.

    Raises ``RuntimeError`` naming the module's class and the attribute, at the line that sets it.
    """
    stores = [store for module in modules for store in (vars(module), module._buffers, module._parameters)]
    before = [dict(store) for store in stores]
    tensors = [(m, n, v, v._version) for m in modules for n, v in vars(m).items() if isinstance(v, torch.Tensor)]
    set_attribute = nn.Module.__setattr__

    def check(module: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, fx.Proxy) and module in modules and not _is_moved(value.node, module, name, value):
            raise RuntimeError(
                f"forward sets {type(module).__name__}.{name} to a value that it computes; outside the transformer "
                f"layers that would be lost"
            )
        if module in modules and _is_number(value) and _is_number(old := vars(module).get(name)) and value != old:
            raise RuntimeError(
                f"forward changes {type(module).__name__}.{name} from {old} to {value}; that would happen at tracing "
                f"only, and every step would use one value. Make it a buffer of a module that changes it."
            )
        set_attribute(module, name, value)

    try:
        with patch.object(nn.Module, "__setattr__", check):
            yield
        for owner, name, tensor, version in tensors:
            if tensor._version != version:
                raise RuntimeError(
                    f"forward changes {type(owner).__name__}.{name}, a tensor that is neither buffer nor parameter, in "
                    f"place; that would happen at tracing only. Make it a buffer of a module that changes it."
                )
    finally:
        for store, old in zip(stores, before, strict=True):
            for name in [name for name, value in store.items() if isinstance(value, fx.Proxy)]:
                _put_back(store, name, old)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_moved(node: Any, module: nn.Module, name: str, proxy: fx.Proxy) -> bool:
    """Whether the value is the attribute ``name`` of ``module`` itself, as another dtype or on another device."""
    if not isinstance(node, fx.Node):
        return False
    if node.op == "get_attr":
        owner, _, attribute = str(node.target).rpartition(".")
        tracer: Any = proxy.tracer
        return attribute == name and tracer.root.get_submodule(owner) is module
    others = [argument for argument in node.all_input_nodes if argument is not node.args[0]]
    return (
        node.op == "call_method"
        and node.target == "to"
        and all(_is_metadata(argument) for argument in others)
        and _is_moved(node.args[0], module, name, proxy)
    )


def _is_metadata(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is getattr and node.args[1] in _METADATA


def _put_back(store: dict[str, Any], name: str, old: dict[str, Any]) -> None:
    if name in old:
        store[name] = old[name]
    else:
        del store[name]
