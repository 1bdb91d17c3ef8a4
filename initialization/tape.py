"""What a constructor did to tensors that have no memory, in order, so that any of them can be made later."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a part of a storage, which is named by its number on the tape."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Generator:
    """Stands for a generator among the arguments of a step; its state is in the step's ``Draw``."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The state that a generator had before a step drew from it; the default one, or one given by the user."""

    state: torch.Tensor
    default: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: tensors without memory among its arguments are a ``View``, others are kept as they were.

    ``creates`` are its results with a storage of their own, by their place among the flat results. ``changes`` are
    the storages written in place, ``overwrites`` those of them whose earlier content does not matter.
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
        """Numbers of the storages whose content the step needs."""
        leaves = tree_leaves((self.arguments, self.keywords))
        return {leaf.storage for leaf in leaves if isinstance(leaf, View)} - self.overwrites

    def touches(self) -> set[int]:
        """Numbers of the storages that the step reads or writes."""
        return self.reads() | self.writes()

    def writes(self) -> set[int]:
        """Numbers of the storages whose content the step changes or makes."""
        return {view.storage for _, view in self.creates} | self.changes

    def replaces(self) -> set[int]:
        """Numbers of the storages of whose content nothing from before the step is left."""
        return {view.storage for _, view in self.creates} | self.overwrites


@dataclass(slots=True)
class Tape:
    """The steps, and for each storage those that wrote it."""

    steps: dict[int, Step] = field(default_factory=dict)
    _length: int = 0
    _writers: dict[int, list[int]] = field(default_factory=dict)
    _storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)
    _sizes: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return self._length

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the storage of ``tensor``; None where the tape does not know it."""
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def add_storage(self, tensor: torch.Tensor) -> int:
        """Give the storage of ``tensor``, which is new and has no content yet, a number."""
        storage = tensor.untyped_storage()
        number = len(self._writers)
        # Held, so that its address is not that of another storage later.
        self._storages[number] = storage
        self._numbers[storage._cdata] = number
        self._writers[number] = []
        return number

    def view(self, tensor: torch.Tensor) -> View:
        """How ``tensor`` lies in its storage, which the tape knows."""
        number = self.number_of(tensor)
        assert number is not None
        return View(number, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def nbytes(self, number: int) -> int:
        """Bytes of a storage, as it is now, or was when it was freed."""
        storage = self._storages.get(number)
        return self._sizes[number] if storage is None else storage.nbytes()

    def append(self, step: Step) -> None:
        """Put ``step`` at the end."""
        self.steps[self._length] = step
        for number in step.writes():
            self._writers[number].append(self._length)
        self._length += 1

    def is_written(self, number: int) -> bool:
        """Whether any step wrote to the storage."""
        return bool(self._writers[number])

    def steps_for(self, storages: Iterable[int]) -> list[int]:
        """Places of the steps, in order, that the present content of ``storages`` follows from."""
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
                step = self.steps[place]
                if place not in needed:
                    needed.add(place)
                    open_ends += [(read, place) for read in step.reads()]
                if number in step.replaces():
                    break
        return sorted(needed)

    def forget_the_dead(self) -> None:
        """Drop storages that no tensor has any more, and the steps that no living one follows from."""
        self._sizes = {number: storage.nbytes() for number, storage in self._storages.items()}
        weak = {number: StorageWeakRef(storage) for number, storage in self._storages.items()}
        self._storages.clear()
        self._numbers.clear()
        for number, reference in weak.items():
            if not reference.expired():
                storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                self._storages[number] = storage
                self._numbers[storage._cdata] = number
        needed = set(self.steps_for(self._storages))
        self.steps = {place: step for place, step in self.steps.items() if place in needed}
        self._writers = {
            number: [place for place in places if place in needed] for number, places in self._writers.items()
        }
