"""Changes of a buffer through ``.data``: torch does not see them, although the backward needs the old buffer.

::

    self.std.data.mul_(0.9)        forward of microbatch 0, then of microbatch 1
    y = x / self.std               backward of microbatch 0: with the std of microbatch 1

One process runs the backward of a microbatch before the next forward. A pipeline has several microbatches in flight.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nxdpp.devices.kinds import memory_of
from nxdpp.ground.torch_names import BUFFERS, SAVED, VERSION
from nxdpp.tracing.code.names import is_framework
from nxdpp.tracing.modules import listings
from nxdpp.tracing.values.nested import leaves_of

_MOST_ITEMS = 1 << 22


class DataOfModule:
    """The present content of the buffers and plain tensors of the user's modules in ``module``."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [
            (path, tensor, VERSION.of(tensor), tensor.detach().clone()) for path, tensor in _tensors(module)
        ]

    def refuse_changes(self, name: str, arguments: Any, output: Any) -> None:
        """Raise ``RuntimeError`` for a tensor that has changed without a new version, if the backward needs it.

        ``name`` is the module's name. ``arguments`` and ``output`` belong to its run.
        """
        changed = {
            memory_of(tensor): (path, tensor)
            for path, tensor, version, content in self._before
            if VERSION.of(tensor) == version and not same_content(content, tensor)
        }
        if not changed:
            return
        after = [(tensor, tensor.detach().clone()) for _, tensor in changed.values()]
        saved = {memory_of(tensor) for tensor in _saved_tensors(arguments, output)}
        # With recomputation a look at a saved tensor runs the module again.
        for tensor, content in after:
            tensor.data.copy_(content)
        for place in changed.keys() & saved:
            path = changed[place][0]
            raise RuntimeError(
                f"{name} changes {path} in place through .data, and its backward needs the values of before: in a "
                f"pipeline several microbatches are in flight, and it would get those of a later one. Assign a new "
                f"tensor instead (self.{path.rpartition('.')[2]} = ...), or use a copy in the computation (.clone())."
            )


def same_content(before: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    """Return whether both have the same shape and the same elements, or neither is known. NaN is equal to itself."""
    if before is None or now is None:
        return before is now
    return before.shape == now.shape and bool((before.eq(now) | (before.ne(before) & now.ne(now))).all())


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, part in listings.named_modules(module):
        if not is_framework(type(part).__module__):
            registries: tuple[dict[str, Any], ...] = (BUFFERS.of(part), vars(part))
            for registry in registries:
                for key, tensor in registry.items():
                    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
                    if is_plain and not tensor.is_meta and not tensor.is_inference() and tensor.numel() <= _MOST_ITEMS:
                        yield (f"{path}.{key}" if path else key), tensor


def _saved_tensors(arguments: Any, output: Any) -> Iterator[torch.Tensor]:
    """The tensors that the autograd graph between ``arguments`` and ``output`` keeps."""
    begin = {tensor.grad_fn for tensor in leaves_of(arguments) if isinstance(tensor, torch.Tensor)}
    pending: list[Any] = [tensor.grad_fn for tensor in leaves_of(output) if isinstance(tensor, torch.Tensor)]
    seen: set[Any] = {None, *begin}
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
            # Batch norm saves its statistics, and computes with the batch's.
            if "BatchNorm" not in node.name():
                yield from _saved_by(node)


def _saved_by(node: Any) -> Iterator[torch.Tensor]:
    names = [name for name in dir(node) if name.startswith(SAVED.name) or name == "saved_tensors"]
    for name in names:
        try:
            value = getattr(node, name)
        except RuntimeError:  # changed in place with a new version: the backward raises
            continue
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor) and item.layout is torch.strided:
                yield item
