"""Number of items of each microbatch: counted by a function of the user, or from the inputs of a loss."""

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxdpp.tracing.models.loss_function import LossFunction
from nxdpp.tracing.models.loss_terms import NUM_ITEMS
from nxdpp.tracing.models.transformers_models import transformers_models
from nxdpp.tracing.values.input_dicts import close_inputs

CountItems = Callable[[dict[str, Any]], Any]
"""A function of a microbatch's inputs. It returns the number of items over which the model's loss is a mean."""

REMEDY = (
    "Give count_items_fn: a function of a microbatch's inputs that returns the number of items over which the model's "
    "loss is a mean. For example lambda inputs: (inputs['labels'] != -100).sum()."
)


def check_normalization(
    module: nn.Module, rule: Any, count_items: Any, loss_function: LossFunction | None = None
) -> None:
    """Raise ``ValueError`` or ``TypeError`` for a rule or a function that ``module`` cannot honour."""
    if count_items is not None and not callable(count_items):
        raise TypeError(f"count_items_fn={count_items!r:.80} must be a function of a microbatch's inputs.")
    if rule == "tokens" and count_items is None and loss_function is not None:
        raise ValueError(f"loss_normalization='tokens': loss_fn has its own mean. {REMEDY}")
    if rule == "tokens" and count_items is None and not _takes_number(module):
        raise ValueError(
            f"loss_normalization='tokens': {type(module).__name__}.forward is not that of a transformers model that "
            f"takes {NUM_ITEMS}. {REMEDY}"
        )


def _takes_number(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters
    takes = NUM_ITEMS in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return takes and bool(transformers_models(module))


def counted(function: CountItems, microbatches: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the number of items of each microbatch. Raises ``ValueError`` or ``TypeError`` for other results."""
    return [
        number_of(
            function(close_inputs(microbatch)), f"the result of count_items_fn for microbatch {number}", positive=False
        )
        for number, microbatch in enumerate(microbatches)
    ]


def number_of(value: Any, name: str, positive: bool = True) -> float:
    """Return a number, or a tensor of one element, as a Python number; 1 for a tensor on the meta device.

    Raises ``TypeError`` for another value, and ``ValueError`` for one that is not finite or too small.
    """
    if isinstance(value, torch.Tensor) and value.is_meta:
        return 1.0
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, or a tensor of one element, not {value!r:.80}.")
    number = float(value)
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise ValueError(f"{name} must be a finite number {'above' if positive else 'of at least'} 0, not {number:g}.")
    return number
