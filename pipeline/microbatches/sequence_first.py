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
class _Kinds:
    """Names of tensors that agree on dimension 0, by what they would be in sequences first.

    Attributes:
        rows: (T, B, ...), with a dimension 1 that is neither 1 nor the size of dimension 0.
        whole: for the tokens of all rows: (T,), (T, 1), a mask (T, T), and a table (T, H) beside inputs of rows.
        labels: (B,), of which no reading has one for each token.
    """

    rows: list[str]
    whole: list[str]
    labels: list[str]


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
    kinds = _kinds_of(module, tensors)
    if len({wide[name][1] for name in kinds.rows}) > 1 or (kinds.rows and kinds.labels):
        shown.update([*kinds.rows, *kinds.labels])
    _check_no_states(module, {name: shape for name, shape in wide.items() if name not in shown})
    taking = None if shown.issuperset(kinds.rows or wide) else _sequence_first(module)
    if taking is None:
        return
    first, second = wide[(kinds.rows or list(wide))[0]][:2]
    shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in tensors.items())
    whole = f", shared_inputs={kinds.whole}" if kinds.whole else ""
    why = f", gives {', '.join(kinds.whole)} whole to each, as of the tokens of all rows," if whole else ","
    is_series = not kinds.rows and any(tensors[name].is_floating_point() for name in wide)
    lone = " One sequence (T, H) has no rows: NxDPPModel(..., num_microbatches=1)." if is_series else ""
    raise ValueError(
        f"{taking} takes sequences first (batch_first=False), and the inputs ({shapes}) fit two readings: {first} rows "
        f"of {second} tokens, or {second} rows of {first}. Say which: NxDPPModel(..., batch_dimension=1{whole}) splits "
        f"rows along dimension 1 into the {microbatches} microbatches, as in (T, B){why} and batch_dimension=0 along "
        f"dimension 0, where the model transposes its inputs itself. A dict by the names of inputs says it for each."
        f"{lone}"
    )


def _kinds_of(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> _Kinds:
    narrow = [name for name, each in tensors.items() if each.ndim == 1 or each.size(1) == 1]
    squares = [name for name, each in tensors.items() if each.ndim > 1 and each.size(1) == each.size(0)]
    others = [name for name in tensors if name not in narrow and name not in squares]
    targets = _targets(module, tensors)
    # A row of an input has more than one floating number for each token, or whole numbers. A target may be (B, 3).
    tables = [n for n in others if n not in targets and tensors[n].ndim == 2 and tensors[n].is_floating_point()]
    rows = [name for name in others if name not in tables]
    has_inputs = any(name not in targets for name in rows)
    has_wide_targets = any(name in targets for name in (*others, *squares))
    labels = [
        name
        for name in narrow
        if _is_label(name) or (name in targets and not has_wide_targets and not tensors[name].is_floating_point())
    ]
    no_rows = {*narrow, *(name for name in squares if tensors[name].ndim == 2 and name not in targets), *tables}
    whole = [name for name in tensors if has_inputs and name in no_rows and name not in labels]
    return _Kinds(rows if has_inputs else [], whole, labels)


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
