"""Replay of the recorded operations that a tensor depends on, with memory."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nxdpp.ground.torch_names import NO_DISPATCH_MODES, NO_TORCH_FUNCTION, STORAGE_ADDRESS, pytree
from nxdpp.initialization.tape import Generator, Operation, Tape, View, overlaps_itself


def compute(tape: Tape, view: View) -> torch.Tensor:
    """Return the content of ``view`` at the present end of the tape: a new CPU tensor with the same strides.

    Elements that no operation wrote are zero. The state of the default generator stays as it is.
    """
    with _neutral_modes():
        memory = _Memory(tape)
        places = tape.operations_for([view.storage])
        last_use = {number: place for place in places for number in tape.operations[place].touches()}
        last_use[view.storage] = len(tape)
        for place in places:
            operation = tape.operations[place]
            _replay(operation, memory)
            memory.free(number for number in operation.touches() if last_use[number] == place)
        return _without_spare_memory(memory.tensor(view))


class _Memory:
    """Storages that have content at this point of a replay."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._storages: dict[int, torch.UntypedStorage] = {}

    def tensor(self, view: View, content_matters: bool = True) -> torch.Tensor:
        """``view`` as a tensor on the storage's memory, which is allocated at the first use."""
        if view.storage not in self._storages:
            make = torch.zeros if content_matters else torch.empty
            memory = make(self._tape.nbytes(view.storage), dtype=torch.uint8, device="cpu")
            self._storages[view.storage] = memory.untyped_storage()
        empty = torch.empty(0, dtype=view.dtype, device="cpu")
        return empty.set_(self._storages[view.storage], view.offset, view.size, view.stride)

    def put(self, view: View, value: torch.Tensor) -> None:
        """Make ``value`` the content of the storage of ``view``, without a copy if possible."""
        storage = value.untyped_storage()
        is_new = all(STORAGE_ADDRESS.of(storage) != STORAGE_ADDRESS.of(other) for other in self._storages.values())
        same_layout = (value.size(), value.stride(), value.storage_offset()) == (view.size, view.stride, view.offset)
        if is_new and same_layout and storage.nbytes() >= self._tape.nbytes(view.storage):
            self._storages[view.storage] = storage
        else:
            self.tensor(view).copy_(value)

    def free(self, numbers: Iterable[int]) -> None:
        """Free the memory of these storages."""
        for number in numbers:
            self._storages.pop(number, None)


def _replay(operation: Operation, memory: _Memory) -> None:
    def with_memory(leaf: Any) -> Any:
        if isinstance(leaf, View):
            return memory.tensor(leaf, content_matters=leaf.storage not in operation.overwrites)
        if isinstance(leaf, Generator):
            assert operation.draw is not None
            return torch.Generator().set_state(operation.draw.state)
        return leaf

    arguments, keywords = pytree.tree_map(with_memory, (operation.arguments, operation.keywords))
    with _default_dtype(operation.default_dtype):
        if operation.draw is not None and operation.draw.default:
            torch.set_rng_state(operation.draw.state)
        results = pytree.tree_leaves(operation.function(*arguments, **keywords))
    for place, view in operation.creates:
        memory.put(view, results[place])


def _without_spare_memory(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with the same strides, in a storage that is no larger than necessary."""
    fills_storage = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    elements_overlap = overlaps_itself(tensor)
    if fills_storage or elements_overlap:
        return tensor
    own = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return own.copy_(tensor)


@contextmanager
def _neutral_modes() -> Iterator[None]:
    """Disable the modes that a caller may have set, and restore the default generator at the end."""
    state = torch.default_generator.get_state()
    try:
        with (
            NO_TORCH_FUNCTION(),
            NO_DISPATCH_MODES(),
            torch.autocast("cpu", enabled=False),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            yield
    finally:
        torch.default_generator.set_state(state)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
