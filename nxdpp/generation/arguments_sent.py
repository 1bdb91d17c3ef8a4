"""Arguments of a forward on their way from the driver to other ranks: only what has changed since the last forward.

::

    input_ids          new        (B, 1)
    attention_mask     appended   the column behind the last one
    encoder_outputs    same       the object of the last forward
    cache              cache      its name; each rank has its own
"""

from collections.abc import Mapping
from typing import Any

import torch

from nxdpp.generation.absent import mapped
from nxdpp.generation.caches import NAMES, record_changes
from nxdpp.ground.torch_names import VERSION

_NEW, _SAME, _APPENDED, _CACHE = "new", "same", "appended", "cache"

_NOTHING = object()


class SentArguments:
    """Arguments and caches of the forwards of one batch, on the driver or on another rank.

    Attributes:
        caches: the present caches by their names.
    """

    def __init__(self) -> None:
        self.caches: dict[str, Any] = {}
        self._last: dict[str, tuple[Any, int]] = {}
        self._changes: list[tuple[str, tuple[Any, ...]]] = []

    def keep_caches(self, values: Mapping[str, Any], is_driver: bool) -> None:
        """Keep the caches among the ``values`` that a forward, or the preparation of one, has made."""
        # Not by name: an output of transformers answers to the old names of its cache too.
        for name, value in values.items():
            if name not in NAMES or value is None:
                continue
            if is_driver and value is not self.caches.get(name):
                record_changes(value, self._changes)
            self.caches[name] = value

    def packed(self, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the changes of the caches, and what stands for each of ``arguments``; on the driver."""
        changes = [list(each) for each in self._changes]
        self._changes.clear()
        return changes, {name: self._of(name, value) for name, value in arguments.items()}

    def unpacked(self, changes: list[Any], arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """Change the caches, and return the arguments; on another rank than the driver."""
        for method, args in changes:
            for cache in self.caches.values():
                if hasattr(cache, method):
                    getattr(cache, method)(*mapped(lambda each: on_device(each, device), args))
        return {name: self._value(name, form[0], form[1], device) for name, form in arguments.items()}

    def _of(self, name: str, value: Any) -> list[Any]:
        for known, cache in self.caches.items():
            if value is cache:
                return [_CACHE, known]
        last, version = self._last.get(name, (_NOTHING, 0))
        is_tensor = isinstance(value, torch.Tensor)
        self._last[name] = value, VERSION.of(value) if is_tensor else 0
        if value is last and (not is_tensor or VERSION.of(value) == version):
            return [_SAME, None]
        if is_tensor and isinstance(last, torch.Tensor) and _is_appended(last, value):
            return [_APPENDED, value[..., -1:]]
        return [_NEW, value]

    def _value(self, name: str, kind: str, content: Any, device: torch.device) -> Any:
        if kind == _CACHE:
            return self.caches[content]
        if kind == _SAME:
            return self._last[name][0]
        value = mapped(lambda each: on_device(each, device), content)
        if kind == _APPENDED:
            value = torch.cat([self._last[name][0], value], dim=-1)
        self._last[name] = value, 0
        return value


def _is_appended(last: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether ``value`` is ``last``, of integers, with one column more."""
    return (
        value.dim() > 1
        and not value.is_floating_point()
        and value.dtype == last.dtype
        and value.shape[:-1] == last.shape[:-1]
        and value.shape[-1] == last.shape[-1] + 1
        and torch.equal(value[..., :-1], last)
    )


def on_device(value: Any, device: torch.device) -> Any:
    """Return a tensor ``value`` on ``device``; other values as they are."""
    return value.to(device) if isinstance(value, torch.Tensor) else value
