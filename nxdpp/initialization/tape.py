"""Tape of the operations that a constructor ran on tensors without memory.

A storage has a number on the tape, and a tensor is a ``View`` of a storage. An operation refers to its tensors by
views. So the only data on the tape are copies of tensors from outside the constructor.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nxdpp.ground.torch_names import SCHEMA, STORAGE_ADDRESS, TorchDispatchMode, pytree


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a part of the storage with the number ``storage``."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Generator:
    """Placeholder of a generator among the arguments of an operation, whose ``Draw`` has its state."""


@dataclass(frozen=True, slots=True)
class Draw:
    """State of a generator before an operation drew from it; ``default`` marks torch's own generator."""

    state: torch.Tensor
    default: bool


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation; each deferred tensor among its arguments is a ``View``, other tensors are copies.

    ``creates`` has the results with a new storage, each with its index in the flat results. ``changes`` are storages
    that are written in place; the earlier content of ``overwrites`` among them is not needed. ``draw`` is the generator
    state of an operation that draws random numbers.
    """

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    creates: tuple[tuple[int, View], ...]
    changes: frozenset[int]
    overwrites: frozenset[int]
    draw: Draw | None
    default_dtype: torch.dtype

    def reads(self) -> set[int]:
        """Storages whose content the operation needs."""
        leaves = pytree.tree_leaves((self.arguments, self.keywords))
        return {leaf.storage for leaf in leaves if isinstance(leaf, View)} - self.overwrites

    def touches(self) -> set[int]:
        """Storages that the operation reads or writes."""
        return self.reads() | self.writes()

    def writes(self) -> set[int]:
        """Storages whose content the operation creates or changes."""
        return {view.storage for _, view in self.creates} | self.changes

    def replaces(self) -> set[int]:
        """Storages whose earlier content is lost in the operation."""
        return {view.storage for _, view in self.creates} | self.overwrites


@dataclass(slots=True)
class Tape:
    """The operations in order, and for each storage the operations that write it."""

    operations: dict[int, Operation] = field(default_factory=dict)
    _length: int = 0
    _writers: dict[int, list[int]] = field(default_factory=dict)
    _storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)
    # After drop_unreachable: storages that others hold, and the sizes of all.
    _held: dict[int, StorageWeakRef] = field(default_factory=dict)
    _sizes: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return self._length

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Number of the storage of ``tensor``; None if the storage is not on the tape."""
        return self._numbers.get(STORAGE_ADDRESS.of(tensor.untyped_storage()))

    def add_storage(self, tensor: torch.Tensor) -> int:
        """Number the storage of ``tensor``, which is new and has no content."""
        storage = tensor.untyped_storage()
        number = len(self._writers)
        # Kept alive, so that no later storage gets its address.
        self._storages[number] = storage
        self._numbers[STORAGE_ADDRESS.of(storage)] = number
        self._writers[number] = []
        return number

    def view(self, tensor: torch.Tensor) -> View:
        """View of the storage of ``tensor``, which is on the tape."""
        number = self.number_of(tensor)
        assert number is not None
        return View(number, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def nbytes(self, number: int) -> int:
        """Bytes of a storage, now or at the time when it was freed."""
        storage = self._storages.get(number)
        return self._sizes[number] if storage is None else storage.nbytes()

    def append(self, operation: Operation) -> None:
        """Add ``operation`` to the end of the tape."""
        self.operations[self._length] = operation
        for number in operation.writes():
            self._writers[number].append(self._length)
        self._length += 1

    def is_written(self, number: int) -> bool:
        """Return whether any operation writes to the storage."""
        return bool(self._writers[number])

    def operations_for(self, storages: Iterable[int]) -> list[int]:
        """Ascending indices of the operations from which the present content of ``storages`` follows."""
        needed: set[int] = set()
        open_ends = [(number, self._length) for number in storages]
        seen: set[tuple[int, int]] = set()
        while open_ends:
            number, end = open_ends.pop()
            writers = self._writers[number]
            for place in reversed(writers[: bisect_left(writers, end)]):
                if (number, place) in seen:
                    break
                seen.add((number, place))
                operation = self.operations[place]
                if place not in needed:
                    needed.add(place)
                    open_ends += [(read, place) for read in operation.reads()]
                if number in operation.replaces():
                    break
        return sorted(needed)

    def drop_unreachable(self) -> None:
        """Drop freed storages, and the operations that no remaining storage depends on."""
        self._sizes = {number: storage.nbytes() for number, storage in self._storages.items()}
        # A weak reference keeps the address too, so that no later storage gets it.
        weak = {number: StorageWeakRef(storage) for number, storage in self._storages.items()}
        self._storages.clear()
        self._held = {number: each for number, each in weak.items() if not each.expired()}
        self._numbers = {address: number for address, number in self._numbers.items() if number in self._held}
        needed = set(self.operations_for(self._held))
        self.operations = {place: operation for place, operation in self.operations.items() if place in needed}
        self._writers = {
            number: [place for place in places if place in needed] for number, places in self._writers.items()
        }


class EnteredMode(TorchDispatchMode):
    """A dispatch mode that tells code below it that it is on."""

    _entered: Any = threading.local()

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def entered(cls) -> list[Any]:
        """The modes of this class that this thread is in, the outermost first."""
        return [mode for mode in getattr(cls._entered, "modes", ()) if isinstance(mode, cls)]

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._entered.modes = [*getattr(self._entered, "modes", ()), self]
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.modes = self._entered.modes[:-1]
        super().__exit__(*error)  # type: ignore[no-untyped-call]


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether elements of an expanded ``tensor`` share memory."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def written_tensors(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensor arguments that ``function``, an operator overload, changes according to its schema."""
    if not SCHEMA.of(function).is_mutable:
        return []
    written: list[torch.Tensor] = []
    for place, argument in enumerate(SCHEMA.of(function).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = arguments[place] if place < len(arguments) else keywords.get(argument.name)
        written += [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    return written
