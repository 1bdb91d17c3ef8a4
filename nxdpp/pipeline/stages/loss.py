"""Choice of the loss among a model's outputs (``output_loss_value_spec`` of NeuronX Distributed's guide)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxdpp.counted import counted
from nxdpp.tracing.models.loss_function import LossFunction
from nxdpp.tracing.values.nested import fields_of, is_dataclass_instance

# A function of a loss that gives the gradient with which its backward begins.
LossGradient = Callable[[torch.Tensor], torch.Tensor]
# A function of the number of a microbatch and its loss that gives the loss to differentiate, of one element.
LossTransform = Callable[[int, torch.Tensor], torch.Tensor]
LossSpec = Mapping[str, Any] | tuple[Any, ...] | list[Any] | bool | None


def check_loss_spec(spec: LossSpec) -> None:
    """Raise ``ValueError`` unless ``spec`` marks exactly one value, ``TypeError`` for values other than booleans."""
    if spec is None:
        return
    marked = _count(spec)
    if marked != 1:
        raise ValueError(
            f"output_loss_value_spec={spec!r} marks {marked} values as the loss; exactly one must be True."
        )


def no_loss(output: Any) -> str:
    """Return a message for an ``output`` that cannot be the loss, such as logits ``(B, T, V)``."""
    if isinstance(output, torch.Tensor):
        given = f"a tensor {tuple(output.shape)} of {output.dtype}"
        if output.is_complex():
            given += ", which has no order: take its real part, or abs()"
    else:
        given = f"{output!r:.80}, a {type(output).__name__}"
    return (
        f"the loss must be a tensor of one element, and the model, or its loss_fn, returned {given}. run_train "
        f"differentiates what forward returns: compute the loss there, and return it; pass the inputs for the loss "
        f"(labels=...), if forward computes one from them; compute it outside of the model, "
        f"loss_fn=lambda output, labels: F.cross_entropy(output, labels); or mark the loss of several outputs with "
        f"output_loss_value_spec. run_eval returns other outputs than a loss."
    )


def pick_loss(output: Any, spec: LossSpec, not_given: Sequence[str] = ()) -> Any:
    """Return the loss in ``output``.

    Without a spec it is the ``loss`` of a dict or ``ModelOutput``, or a lone value. A dict spec finds a value by name.
    A tuple spec finds it by position, in a ``ModelOutput`` by the position in its ``to_tuple()``. A bool marks the
    output itself. ``not_given`` are inputs of the model that the step did not get, for a message. Raises ``ValueError``
    for an output without such a value.
    """
    output = _named(output)
    if spec is not None:
        return _follow(output, spec, spec)
    if isinstance(output, Mapping):
        if output.get("loss") is not None:
            return output["loss"]
        likely = [name for name in not_given if "label" in name or "target" in name] or list(not_given) or ["labels"]
        inputs = ", ".join(f"{name}=..." for name in likely)
        raise ValueError(
            f"the model's output has no loss, only {sorted(output)}. Pass the inputs from which the model computes "
            f"one ({inputs}), name the output with output_loss_value_spec, or compute the loss: "
            f"loss_fn=lambda output, labels: ..."
        )
    if isinstance(output, tuple | list):
        if len(output) == 1:
            return output[0]
        places = range(len(output))
        first, last = (tuple(place == marked for place in places) for marked in (0, len(output) - 1))
        raise ValueError(
            f"the model returns {counted(len(output), 'value')}. Mark the loss with output_loss_value_spec: {first} if "
            f"it is the first, {last} if it is the last. If none is a loss, compute it: loss_fn=lambda output, labels: "
            "..."
        )
    return output


def pick_loss_of_sample(output: Any, spec: LossSpec) -> Any:
    """Return the loss in the ``output`` for one sample: as ``pick_loss``, and without a spec the first of a tuple."""
    is_tuple = spec is None and isinstance(output, tuple | list) and len(output) > 1
    return output[0] if is_tuple else pick_loss(output, spec)


def loss_of_sample(module: nn.Module, inputs: Mapping[str, Any], spec: LossSpec, function: LossFunction | None) -> Any:
    """Run ``module`` on the inputs of one sample in this process, and return its loss."""
    if function is None:
        return pick_loss_of_sample(module(**inputs), spec)
    return function.loss(module(**function.of_module(module, inputs)), inputs)


def _named(output: Any) -> Any:
    is_plain_dataclass = is_dataclass_instance(output) and not isinstance(output, Mapping)
    return fields_of(output) if is_plain_dataclass else output


def _count(spec: Any) -> int:
    if isinstance(spec, bool):
        return int(spec)
    if isinstance(spec, Mapping):
        return sum(_count(part) for part in spec.values())
    if isinstance(spec, tuple | list):
        return sum(_count(part) for part in spec)
    raise TypeError(
        f'output_loss_value_spec takes booleans in dicts and tuples, not {spec!r}: {{"loss": True}} for the value of '
        f"this name, (False, True) for the second of two, True for an output that is the loss."
    )


def _follow(output: Any, spec: Any, whole: Any) -> Any:
    output = _named(output)
    if isinstance(spec, bool):
        return output
    if isinstance(spec, Mapping):
        key = next(key for key, part in spec.items() if _count(part))
        if not isinstance(output, Mapping) or output.get(key) is None:
            has = sorted(output) if isinstance(output, Mapping) else f"a {type(output).__name__}"
            raise ValueError(f"output_loss_value_spec={whole!r} marks {key!r}; the model's output has: {has}.")
        return _follow(output[key], spec[key], whole)
    position = next(i for i, part in enumerate(spec) if _count(part))
    values = list(output.values()) if isinstance(output, Mapping) else output
    if not isinstance(values, tuple | list) or len(values) != len(spec):
        has = counted(len(values), "value") if isinstance(values, tuple | list) else f"one {type(output).__name__}"
        raise ValueError(
            f"output_loss_value_spec={whole!r} is for {counted(len(spec), 'value')}; the model returns {has}. "
            f"Were the inputs for the loss (labels=...) given?"
        )
    return _follow(values[position], spec[position], whole)
