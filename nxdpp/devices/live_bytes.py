"""Memory of the tensors that operations make, and that live at the same time."""

import weakref
from typing import Any

import torch

from nxdpp.ground.torch_names import STORAGE_ADDRESS, TorchDispatchMode, pytree


class LiveBytes(TorchDispatchMode):
    """Mode that counts the bytes of tensors made under it, as long as they live.

    Memory counts once. Memory of earlier tensors does not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: dict[int, Any] = {}

    def know(self, tensors: list[torch.Tensor]) -> None:
        """Leave out the memory of ``tensors``."""
        for tensor in tensors:
            self._known.setdefault(STORAGE_ADDRESS.of(tensor.untyped_storage()), None)

    def reset_peak(self) -> None:
        """Begin a new peak."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and count the memory of its results."""
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = STORAGE_ADDRESS.of(storage), storage.nbytes()
        if key in self._known:
            return
        # The reference's own object must live for its callback.
        self._known[key] = weakref.ref(storage, lambda _: self._free(key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _free(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.now -= size


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments or results of an operation."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
