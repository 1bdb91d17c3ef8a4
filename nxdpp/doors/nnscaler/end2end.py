"""Checks of a module's forward, of the dummy arguments, and of the samples and the loss of an end-to-end module."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxdpp.counted import counted


def check_forward(module: type[nn.Module], dummy_forward_args: Any, is_end2end: bool) -> None:
    """Verify the arguments of ``module.forward`` and the names in ``dummy_forward_args``.

    Raises:
        TypeError: for dummy arguments that are not a dict of names.
        ValueError: for positional-only arguments, for names that forward does not have, and for missing names.
            With ``is_end2end`` also for arguments after the sample that have no default.
    """
    if not isinstance(dummy_forward_args, Mapping) or not all(isinstance(name, str) for name in dummy_forward_args):
        raise TypeError(
            f"dummy_forward_args must be a dict from the names of forward's arguments, not {dummy_forward_args!r:.80}"
        )
    name = module.__name__
    parameters = forward_parameters(module)
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(
                f"{name}.forward has the positional-only argument {parameter.name}: leave the / out of its signature"
            )
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = [each.name for each in parameters if each.kind is not each.VAR_POSITIONAL]
        if unknown := [given for given in dummy_forward_args if given not in known]:
            raise ValueError(
                f"dummy_forward_args has {', '.join(unknown)}, and {name}.forward takes {', '.join(known) or 'nothing'}"
            )
    needed = [parameter.name for parameter in parameters if _is_needed(parameter)]
    if missing := [each for each in needed if each not in dummy_forward_args]:
        raise ValueError(f"dummy_forward_args lacks {', '.join(missing)}, which {name}.forward needs")
    if is_end2end:
        _check_sample(name, parameters, dummy_forward_args)


def sample_name(module: type[nn.Module]) -> str:
    """Return the name of the first argument of ``module.forward``, which takes the sample."""
    return forward_parameters(module)[0].name


def forward_parameters(module: type[nn.Module]) -> list[inspect.Parameter]:
    """Return the arguments of ``module.forward`` without ``self``."""
    return list(inspect.signature(module.forward).parameters.values())[1:]


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss, the first value of ``output``, or the ``loss`` of a dict.

    Raises ``RuntimeError`` for an output without a tensor of one element there.
    """
    first = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(first, tuple | list) and first:
        first = first[0]
    if not isinstance(first, torch.Tensor) or first.numel() != 1:
        found = f"a tensor of shape {tuple(first.shape)}" if isinstance(first, torch.Tensor) else type(first).__name__
        raise RuntimeError(f"forward of an end-to-end module must return a scalar loss first, and returned {found}")
    return first


def _check_sample(name: str, parameters: list[inspect.Parameter], dummy_forward_args: Mapping[str, Any]) -> None:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if not parameters or parameters[0].kind in kinds:
        raise ValueError(f"use_end2end=True needs a first argument of {name}.forward that takes the sample")
    first = parameters[0].name
    if first not in dummy_forward_args:
        raise ValueError(f"dummy_forward_args lacks {first}, the sample of {name}.forward")
    others = [each for each in parameters[1:] if each.kind not in kinds[:2]]
    if without := [each.name for each in others if each.default is each.empty]:
        raise ValueError(
            f"use_end2end=True gives {name}.forward the sample alone, and its argument {without[0]} has no default"
        )
    if given := [each for each in dummy_forward_args if each != first]:
        raise ValueError(
            f"use_end2end=True gives {name}.forward the sample alone: leave {', '.join(given)} out of "
            f"dummy_forward_args"
        )


def _is_needed(parameter: inspect.Parameter) -> bool:
    is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return not is_variable and parameter.default is parameter.empty


def check_samples(samples: Sequence[Any], needed: int | None, is_dummy_batch: Sequence[bool] | None = None) -> None:
    """Raise ``TypeError`` or ``ValueError`` for samples that are not a list, and for a wrong number of them.

    ``needed`` is the number that a step of a pipeline takes. ``None`` without a pipeline.
    """
    if isinstance(samples, str | bytes) or not isinstance(samples, Sequence):
        raise TypeError(f"samples must be a list with one value for each sample, not a {type(samples).__name__}")
    if not samples:
        raise ValueError("samples is empty: give at least one sample")
    if needed is not None and len(samples) != needed:
        raise ValueError(
            f"{counted(len(samples), 'sample was', 'samples were')} given, and a step of this pipeline takes {needed} "
            "(pipeline_nmicros)"
        )
    if is_dummy_batch is not None and len(is_dummy_batch) != len(samples):
        raise ValueError(
            f"is_dummy_batch has {counted(len(is_dummy_batch), 'value')} for {counted(len(samples), 'sample')}: give "
            "one for each"
        )
