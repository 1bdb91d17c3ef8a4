"""Split of a step's inputs into microbatches, by rows."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy
import torch
from torch import nn

from nxdpp.devices.host_answers import can_be_copied, note_host_copy, note_inputs
from nxdpp.devices.kinds import device_of, has_streams, readable
from nxdpp.tracing.values.input_dicts import NUMBERS, InputDict

_ACCEPTED = (torch.Tensor, *NUMBERS, numpy.bool_, str, type(None), InputDict)
_ADVICE = (
    "a pipeline takes tensors, None, numbers, strings, booleans, lists of these without tensors, and dicts of these by "
    "names. Pass its tensors as inputs of their own, or in a dict. Make tensors of arrays with torch.as_tensor(values)."
)


def check_kinds(inputs: Mapping[str, Any], device: torch.device, advice: str = _ADVICE) -> None:
    """Raise ``TypeError`` for an input of another kind, ``ValueError`` for a tensor on another device than ``device``.

    Tensors in host memory are moved there, see ``on_device``. ``advice`` tells which kinds are taken. Raises
    ``ValueError`` for a tensor that requires gradients too, where gradients are on.
    """
    for name, value in inputs.items():
        if not isinstance(value, _ACCEPTED):
            raise TypeError(f"input {name} is a {type(value).__name__}; {advice}")
        if isinstance(value, torch.Tensor) and value.device != device and (device.type == "meta" or not value.is_cpu):
            if value.is_meta:
                raise ValueError(
                    f"input {name} is on meta, and has no values: it may be made from a parameter of "
                    f"another rank, which is on the meta device here (parameter.new_zeros(...), "
                    f"device=parameter.device). Name the device of this rank: torch.zeros(..., "
                    f"device=nxdpp.parallel_state.local_device())."
                )
            raise ValueError(
                f"input {name} is on {value.device}, but this rank's stage is on {device}. Move the input with "
                f".to({str(device)!r}), or the stage with move_model_to_device()."
            )
        if isinstance(value, torch.Tensor) and torch.is_grad_enabled():
            _refuse_trained(name, value)


def readable_opened(opened: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
    """Return opened inputs with tensors in host memory if a part of one on ``device`` would be a graph of its own.

    A split there would make another graph for each microbatch, and a look at the values one more.
    """
    if not device_of(device).is_lazy:
        return opened
    on_it = {
        id(value): value for value in opened.values() if isinstance(value, torch.Tensor) and value.device == device
    }
    copies = {key: readable(tensor) for key, tensor in on_it.items()}
    return {name: copies.get(id(value), value) for name, value in opened.items()}


def check_batch(
    inputs: Mapping[str, Any],
    microbatches: int,
    shared: Collection[str] = (),
    place: str = "dimension 0",
    is_uneven: bool = False,
) -> None:
    """Raise ``ValueError`` unless the inputs, with their rows along dimension 0, can be split; ``place`` is theirs.

    Tensors ``(B, ...)`` must agree on ``B``, a multiple of ``microbatches`` unless it ``is_uneven``. All microbatches
    share tensors of first dimension 1 next to larger ones, ``shared`` inputs, and values of other types. A single
    microbatch takes tensors of any shape.
    """
    sizes = {name: tensor.size(0) for name, tensor in _tensors(inputs).items() if name not in shared}
    batches = {name: size for name, size in sizes.items() if size != 1} or sizes
    if len(set(batches.values())) > 1 and microbatches > 1:
        raise ValueError(
            f"the inputs disagree on {place}, the batch: {batches}. {_flat_targets(inputs, shared)}Give all the same "
            f"batch size. Name tensors that all rows share, such as a mask (T, T), in NxDPPModel(..., shared_inputs="
            f"[NAME]); without it a step in which they had the size of the batch has split them. batch_dimension=1 is "
            f"for rows along dimension 1, (T, B). Or use num_microbatches=1, or give split_inputs_fn, a function of "
            f"the inputs and num_microbatches that returns the inputs of each microbatch."
        )
    batch = next(iter(batches.values()), None)
    if batch is not None and (batch == 0 or (batch % microbatches and not is_uneven)):
        raise ValueError(
            f"a batch of {batch} ({', '.join(batches)}) does not divide into num_microbatches={microbatches}. Use a "
            f"batch size that is a multiple of {microbatches}. If this is the last, smaller batch of an epoch, leave "
            f"it out: DataLoader(..., drop_last=True). run_eval takes any number of rows."
        )
    _refuse_lists_of_rows(inputs, batch, microbatches)


def _flat_targets(inputs: Mapping[str, Any], shared: Collection[str]) -> str:
    """Return the remedy for targets (T * B,) beside (T, B), whose rows are not in one piece; ``""`` without such."""
    tensors = {name: each for name, each in _tensors(inputs).items() if name not in shared}
    wide = {name: each.size(0) * each.size(1) for name, each in tensors.items() if each.ndim > 1}
    found = [(name, n) for name, each in tensors.items() for n in wide if each.ndim == 1 and len(each) == wide[n]]
    if not found:
        return ""
    flat, other = found[0]
    own = flat if flat.isidentifier() else "labels"
    return (
        f"{flat} has one dimension, and as many values as {other} has tokens, which cannot be told by rows. Give "
        f"{flat}.reshape({other}.shape[:2]), and flatten it where the loss is computed, such as in loss_fn=lambda "
        f"output, {own}: cross_entropy(output.flatten(0, -2), {own}.flatten()). Where {other} is (T, B), set "
        f"NxDPPModel(..., batch_dimension=1) too. In other cases: "
    )


def _refuse_trained(name: str, tensor: torch.Tensor) -> None:
    function = tensor.grad_fn
    if tensor.requires_grad:
        origin = "is a parameter" if isinstance(tensor, nn.Parameter) else "requires gradients"
        origin = origin if function is None else f"was computed with gradients ({function.name()})"
        raise ValueError(
            f"input {name} {origin} outside the model: each microbatch would go back through it, and only on ranks "
            f"whose stages use {name}. Make what computes it a part of the model before wrapping: set the parameter or "
            f"module as an attribute, and use it in forward. If nothing outside is trained, give {name}.detach()."
        )


def _refuse_lists_of_rows(inputs: Mapping[str, Any], batch: int | None, microbatches: int) -> None:
    lists = {name: v for name, v in inputs.items() if isinstance(v, InputDict) and v.kind in (list, tuple)}
    inside = {name for value in lists.values() for _, name in value.names}
    for name, value in lists.items():
        if len(value.names) == batch != 1 and microbatches > 1 and name not in inside:
            raise ValueError(
                f"input {name} is a {value.kind.__name__} of {batch} values, and the batch has {batch} rows: each row "
                f"may have a value, or each microbatch the whole {value.kind.__name__}. Make it a tensor with "
                f"torch.as_tensor(values), which is split, or give split_inputs_fn, a function of the inputs and "
                f"num_microbatches that returns the inputs of each microbatch."
            )


def check_not_shared(inputs: Mapping[str, Any], microbatches: int, of_rows: set[str]) -> None:
    """Raise ``ValueError`` for tensors that a split may tear apart: ``(T,)`` or ``(T, T)`` in a batch of ``T`` rows.

    They may be positions, weights or masks of the tokens for all rows. That the rows have ``T`` tokens shows in whole
    numbers ``(B, T)`` or floating numbers ``(B, T, H)`` among the inputs, so whole numbers ``(T, T)`` are no question.

    Args:
        inputs: of a batch that ``check_batch`` accepts.
        microbatches: the number of parts.
        of_rows: names that had a part for each row in an earlier batch, whose rows had a different number of tokens.
            Those of such a batch are added.
    """
    tensors = {name: tensor for name, tensor in _tensors(inputs).items() if tensor.size(0) > 1}
    boolean = {name for name, tensor in tensors.items() if tensor.dtype == torch.bool}
    in_rows = [each for name, each in tensors.items() if name not in boolean]
    tokens = {each.size(1) for each in in_rows if each.ndim == 2 + each.is_floating_point()}
    batch = next((each.size(0) for each in tensors.values()), 1)
    if batch not in tokens:
        of_rows.update(tensors if tokens else ())
        return
    squares = {name for name, each in tensors.items() if each.ndim == 2 and each.size(1) == batch}
    masks = {name for name in squares if name in boolean or tensors[name].is_floating_point()}
    doubtful = [n for n, each in tensors.items() if n not in of_rows and (each.ndim == 1 or n in masks)]
    if doubtful and microbatches > 1:
        raise ValueError(
            f"the batch has {batch} rows of {batch} tokens, so that {', '.join(doubtful)} may have a part for each "
            f"row, or be one for the tokens of all rows, such as a mask (T, T), positions (T,) or a weight (T,). Say "
            f"which: NxDPPModel(..., shared_inputs={doubtful}) gives them whole to each of the {microbatches} "
            f"microbatches, and shared_inputs=[] splits all inputs."
        )


def _tensors(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.ndim}


def split_inputs(
    inputs: Mapping[str, Any],
    microbatches: int,
    shared: Collection[str] = (),
    dimensions: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Return the inputs of each microbatch: ``(B / microbatches, ...)`` of each tensor ``(B, ...)``; others whole.

    ``dimensions`` has the dimension of the rows of each input, by default 0. The first microbatches have a row more
    where ``B`` is no multiple.
    """
    along = dimensions or dict.fromkeys(inputs, 0)
    sizes = {name: tensor.size(along[name]) for name, tensor in _tensors(inputs).items()}
    batch = max((size for name, size in sizes.items() if name not in shared), default=1)

    def parts(name: str, value: Any) -> list[Any]:
        if name in shared or name not in sizes or sizes[name] != batch or microbatches == 1:
            return [value] * microbatches
        pieces = value.tensor_split(microbatches, along[name])
        # Views share one counter of changes, and a model may change its input in place (x.div_(255)).
        return [piece if piece.requires_grad else piece.data for piece in pieces]

    columns = {name: parts(name, value) for name, value in inputs.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(microbatches)]


def on_device(parts: list[dict[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """Return the inputs of each microbatch with all tensors on ``device``; starts copies and waits for none."""
    # A tensor that several microbatches share is copied once.
    tensors = {id(v): v for part in parts for v in part.values() if isinstance(v, torch.Tensor)}
    moved = {key: device_of(device).from_host(tensor) for key, tensor in tensors.items() if tensor.device != device}
    if has_streams(device.type):
        for key in moved:
            if tensors[key].is_cpu:
                note_host_copy(moved[key], tensors[key])
        there = {key: tensors[key].detach() for key in tensors.keys() - moved.keys() if can_be_copied(tensors[key])}
        note_inputs(list(there.values()))
        moved |= there
    if not moved:
        return parts
    return [{name: moved.get(id(value), value) for name, value in part.items()} for part in parts]
