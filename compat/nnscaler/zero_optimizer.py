"""``Zero1Optimizer`` with the groups and options of a program's optimizer."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from nxdpp.optimizer import Zero1Optimizer

_PLAIN = (bool, int, float, str, type(None))


def zero_optimizer(made: Optimizer, kwargs: Mapping[str, Any], bucket_bytes: int) -> Zero1Optimizer:
    """Return an optimizer of the class of ``made``, over its groups, whose state the units share.

    ``made`` is not used any more. ``kwargs`` were the arguments of the class, or of a function that made it.

    Raises ``TypeError`` or ``ValueError`` for a class that is not elementwise, or cannot be made again alike.
    """
    kind = type(made)
    accepted = inspect.signature(kind).parameters
    any_name = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in accepted.values())
    options = {name: value for name, value in {**made.defaults, **kwargs}.items() if any_name or name in accepted}
    # Each group has all options of its own; those of the class come from its arguments.
    zero = Zero1Optimizer(
        [dict(group) for group in made.param_groups],
        kind,
        grad_clipping=False,
        bucket_cap_mb=bucket_bytes / 2**20,
        reduction="sum",
        **options,
    )
    before, after = _plain_attributes(made), _plain_attributes(zero.base_optimizer)
    different = sorted(name for name in before if name not in after or before[name] != after[name])
    if different:
        raise ValueError(
            f"use_zero makes the {kind.__name__} of optimizer_fn again over shards, and its attribute {different[0]!r} "
            f"would be lost: let optimizer_fn be a class, or leave use_zero out"
        )
    return zero


def _plain_attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, _PLAIN)}
