"""Signature of a step, the difference of two for a message, and the caches of what is made for signatures."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from nxdpp.counted import counted

# Sequences of 1 to 256 tokens, one item each, stay in a cache.
KEPT = 256

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

InputShapes = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""Name, shape and dtype of each tensor among the inputs of a microbatch."""


class Forms(NamedTuple):
    """Forms of the microbatches of a step: microbatches of one form have equal shapes and one graph.

    ``first`` has the shapes of form 0, and ``others`` the shapes of later forms. ``numbers`` has the form of each
    microbatch, and ``graphs`` the number of the graph of each form. All but ``first`` are empty for one form.
    """

    first: InputShapes
    numbers: tuple[int, ...] = ()
    others: tuple[InputShapes, ...] = ()
    graphs: tuple[int, ...] = ()


class StepSignature(NamedTuple):
    """InputShapes and dtypes of a microbatch's inputs, the autocast of the device, and ``True`` for a training step.

    ``forms``, ``others`` and ``graphs`` are those of ``Forms``. ``microbatches`` is their number. ``everywhere`` is
    ``True`` where all ranks get the results.
    """

    inputs: InputShapes
    autocast: tuple[bool, torch.dtype]
    train: bool
    forms: tuple[int, ...] = ()
    others: tuple[InputShapes, ...] = ()
    microbatches: int = 1
    graphs: tuple[int, ...] = ()
    everywhere: bool = False


def input_shapes(inputs: Mapping[str, Any]) -> InputShapes:
    """Return the shapes of the tensors. Other inputs are part of the graph, or checked when they change a shape."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    return tuple((name, tuple(value.shape), value.dtype) for name, value in sorted(tensors.items()))


def forms_of(microbatches: Sequence[Mapping[str, Any]], graphs: Sequence[int] = ()) -> Forms:
    """Return the forms of ``microbatches``, numbered in the order of their first microbatch.

    ``graphs`` has the number of the graph of each microbatch; empty for one graph.
    """
    shapes = map(input_shapes, microbatches)
    given = list(zip(shapes, graphs or [0] * len(microbatches), strict=True))
    known = {form: number for number, form in enumerate(dict.fromkeys(given))}
    (first, *others), numbers = zip(*known, strict=True)
    if not others:
        return Forms(first)
    return Forms(first, tuple(known[each] for each in given), tuple(others), numbers)


def signature_differences(theirs: StepSignature, ours: StepSignature) -> list[tuple[str, str]]:
    """Texts of the differences between two signatures, ``theirs`` first."""
    pairs = [(_call(theirs), _call(ours)), (_autocast(theirs), _autocast(ours))]
    there, here = ({name: f"{name} {shape} {dtype}" for name, shape, dtype in each.inputs} for each in (theirs, ours))
    pairs += [(there.get(name, f"no {name}"), here.get(name, f"no {name}")) for name in {**there, **here}]
    pairs.append((counted(theirs.microbatches, "microbatch"), counted(ours.microbatches, "microbatch")))
    pairs.append((_forms(theirs), _forms(ours)))
    return [pair for pair in pairs if pair[0] != pair[1]]


def _call(signature: StepSignature) -> str:
    return "run_train" if signature.train else f"run_eval{'(everywhere=True)' if signature.everywhere else ''}"


def _forms(signature: StepSignature) -> str:
    if not signature.forms:
        return "equal shapes in all samples"
    lines = [f"{name} {shape} {dtype}" for shapes in signature.others for name, shape, dtype in shapes]
    return f"samples of other shapes ({', '.join(lines)}) in the order {signature.forms}"


def _autocast(signature: StepSignature) -> str:
    is_enabled, dtype = signature.autocast
    return f"autocast to {dtype}" if is_enabled else "no autocast"


class LastUsed(OrderedDict[_Key, _Value]):
    """A dictionary of the ``KEPT`` items that were read or written last: of every cache that grows with the inputs.

    All ranks of a pipeline use the same items in the same order. All of them therefore drop the same items: an engine
    on one rank needs the engines on the others.
    """

    def __getitem__(self, key: _Key) -> _Value:
        value = super().__getitem__(key)
        self.move_to_end(key)
        return value

    def get(self, key: _Key, default: Any = None) -> Any:
        """Return the value of ``key``, or ``default`` for a key that is not kept."""
        value = super().get(key, default)
        if value is not default:
            self.move_to_end(key)
        return value

    def __setitem__(self, key: _Key, value: _Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > KEPT:
            del self[next(iter(self))]
