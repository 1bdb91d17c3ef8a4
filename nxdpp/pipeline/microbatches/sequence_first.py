"""The question for inputs that a module with ``batch_first=False`` may take with the sequence first, (T, B).

::

    src (6, 4)  targets (6, 4)                      6 rows of 4 tokens, or 4 rows of 6: a question
    src (6, 4)  targets (6, 4)  positions (6,)      the same: positions of tokens have no rows
    src (6, 4)  targets (6, 4)  mask (6, 6)         the same: a mask of tokens has none
    x (6, 4, 8) labels (6,)                         6 rows: a label is of a row
    x (6, 4, 8) target (6, 3)                       6 rows: sequences first, both would have the rows along dimension 1

A model may transpose its inputs, or take them so, and a cut along the sequence gives other losses without an error. So
only that is evidence which could be no tensor for the tokens of all rows. States of recurrent modules, (layers, B, H),
are a question where the batch has as many rows as there are layers.
"""

import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nxdpp.tracing.modules import listings

_LABELS = frozenset({"label", "labels", "target", "targets", "y"})


@dataclass(frozen=True)
class _Reading:
    """Names of tensors that agree on dimension 0, by what they are in sequences first.

    Attributes:
        rows: (T, B, ...), which agree on B. Empty where an input (T, B) of floating numbers may be a sequence (T, H).
        whole: for the tokens of all rows: (T,), (T, 1), a mask (T, T), a table (T, H).
        is_none: sizes or labels tell that there is no such reading; all are in ``rows``.
    """

    rows: list[str]
    whole: list[str]
    is_none: bool = False


def check_not_sequence_first(module: nn.Module, inputs: Mapping[str, Any], microbatches: int, shown: set[str]) -> None:
    """Raise ``ValueError`` for inputs that may be sequences first, where a module takes those.

    Args:
        module: the model; inputs of transformers' have their rows along dimension 0.
        inputs: opened inputs that agree on dimension 0.
        microbatches: the number of parts.
        shown: names that had their rows along dimension 0 in an earlier batch. Those of such a batch are added.
    """
    tensors = {n: each for n, each in inputs.items() if isinstance(each, torch.Tensor) and each.ndim}
    tensors = {name: each for name, each in tensors.items() if each.size(0) > 1}
    wide = {name: each.shape for name, each in tensors.items() if each.ndim > 1}
    if microbatches == 1 or not wide or isinstance(module, PreTrainedModel):
        return
    reading = _reading_of(module, tensors)
    if reading.is_none:
        shown.update(reading.rows)
    _check_no_states(module, {name: shape for name, shape in wide.items() if name not in shown})
    taking = None if shown.issuperset(reading.rows or wide) else _sequence_first(module)
    if taking is None:
        return
    first, second = wide[(reading.rows or list(wide))[0]][:2]
    shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in tensors.items())
    whole = f", shared_inputs={reading.whole}" if reading.whole else ""
    why = f", gives {', '.join(reading.whole)} whole to each, as of the tokens of all rows," if whole else ","
    is_series = not reading.rows and any(tensors[name].is_floating_point() for name in wide)
    lone = " One sequence (T, H) has no rows: NxDPPModel(..., num_microbatches=1)." if is_series else ""
    raise ValueError(
        f"{taking} takes sequences first (batch_first=False), and the inputs ({shapes}) fit two readings: {first} rows "
        f"of {second} tokens, or {second} rows of {first}. Say which: NxDPPModel(..., batch_dimension=1{whole}) splits "
        f"rows along dimension 1 into the {microbatches} microbatches, as in (T, B){why} and batch_dimension=0 along "
        f"dimension 0, where the model transposes its inputs itself. A dict by the names of inputs says it for each."
        f"{lone}"
    )


def _reading_of(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> _Reading:
    shapes = {name: each.shape for name, each in tensors.items()}
    narrow = [name for name, shape in shapes.items() if len(shape) == 1 or shape[1] == 1]
    squares = [name for name, shape in shapes.items() if len(shape) > 1 and shape[1] == shape[0]]
    others = [name for name in tensors if name not in narrow and name not in squares]
    floating = {name for name, each in tensors.items() if each.is_floating_point()}
    targets = _targets(module, tensors)
    has_images = any(len(shape) > 3 for shape in shapes.values())
    # An input of two dimensions may be a table (T, H) of all rows; whole numbers beside images are texts.
    of_rows = [n for n in others if n in targets or len(shapes[n]) > 2 or (has_images and n not in floating)]
    numbers = [n for n in others if n not in of_rows and n not in floating]
    if not numbers and targets.issuperset(of_rows):
        return _Reading([], [])
    sizes = {shapes[name][1] for name in of_rows or numbers[:1]}
    rows = [name for name in others if shapes[name][1] in sizes]
    wide_targets = targets.intersection([*others, *squares])
    labels = [n for n in narrow if _is_label(n) or (n in targets and not wide_targets and n not in floating)]
    if labels or len(sizes) > 1 or targets.issuperset(rows):
        return _Reading([*others, *labels], [], is_none=True)
    masks = {name for name in squares if len(shapes[name]) == 2 and name not in targets}
    return _Reading(rows, [n for n in tensors if n in masks or n in narrow or (n in others and n not in rows)])


def _targets(module: nn.Module, names: Collection[str]) -> set[str]:
    """The names of labels, and of inputs of the loss alone, which ``module.forward`` has no parameter for."""
    parameters = inspect.signature(module.forward).parameters
    takes_others = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    loss = {name for name in names if not takes_others and name.partition("[")[0] not in parameters}
    return loss | {name for name in names if _is_label(name)}


def _is_label(name: str) -> bool:
    return re.findall(r"\w+", name)[-1] in _LABELS


def _check_no_states(module: nn.Module, wide: Mapping[str, torch.Size]) -> None:
    """Raise ``ValueError`` for what may be states (layers, B, H) of recurrent modules, of as many rows as layers."""
    squares = {name: shape for name, shape in wide.items() if len(shape) == 3 and shape[0] == shape[1]}
    if not squares:
        return
    recurrent = [(name, each) for name, each in listings.named_modules(module) if isinstance(each, nn.RNNBase)]
    layers = [each.num_layers * (1 + each.bidirectional) for _, each in recurrent]
    widths = {width for _, each in recurrent for width in (each.hidden_size, each.proj_size)}
    states = [n for n, shape in squares.items() if shape[0] in {*layers, sum(layers)} and shape[2] in widths]
    if states:
        name, each = recurrent[0]
        shapes = ", ".join(f"{name} {tuple(squares[name])}" for name in states)
        raise ValueError(
            f"the inputs {shapes} may be states (layers, B, H) of recurrent modules, as of {name or 'the model'}, a "
            f"{type(each).__name__}, or have their rows along dimension 0. Say which: NxDPPModel(..., batch_dimension="
            f"{dict.fromkeys(states, 1)}) splits states along dimension 1, and {dict.fromkeys(states, 0)} rows along 0."
        )


def _sequence_first(module: nn.Module) -> str | None:
    """The first module with ``batch_first=False``, in words."""
    for name, each in listings.named_modules(module):
        if getattr(each, "batch_first", None) is False:
            return f"{name or 'the model'}, a {type(each).__name__},"
    return None
