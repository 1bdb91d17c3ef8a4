"""Batches that are generated at once: given as a list, or the rows of one batch in equal parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationConfig

from nxdpp.generation.absent import leaves_in, mapped


@dataclass(frozen=True)
class GeneratedBatch:
    """Arguments of ``generate`` that differ between batches, and the seed of the batch's random numbers."""

    arguments: dict[str, Any]
    seed: int = 0


def is_list(inputs: Any) -> bool:
    """Return whether ``inputs`` are several batches."""
    return isinstance(inputs, list | tuple)


def has_tensors(value: Any) -> bool:
    """Return whether ``value`` is a tensor or has some, such as a list of images of different sizes."""
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves_in(value))


def samples(module: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether a generation with ``arguments`` draws random numbers."""
    return bool(setting(module, arguments, "do_sample"))


def setting(module: Any, arguments: Mapping[str, Any], name: str) -> Any:
    """Return what ``generate`` of ``module`` takes for ``name``: the argument, a given config's field, or the model's.

    A field that is ``None`` in a given ``generation_config`` is the model's.
    """
    if name in arguments:
        return arguments[name]
    given = getattr(arguments.get("generation_config"), name, None)
    return getattr(module.generation_config, name, None) if given is None else given


def batches_of(
    module: nn.Module, inputs: Any, parts: int, arguments: Mapping[str, Any], device: torch.device
) -> list[GeneratedBatch]:
    """Return the batches, with their tensors on ``device``.

    Several batches that sample draw their seeds from torch's generator: ``torch.randint(2**63 - 1, (n,))``.
    """
    if is_list(inputs):
        given = [dict(each) for each in inputs]
    elif parts == 1:
        given = [{"inputs": inputs, **_tensors(arguments)}]
    else:
        whole = {"inputs": inputs, **_tensors(arguments)}
        split = {name: value.chunk(parts) for name, value in whole.items() if value is not None}
        given = [{name: rows[number] for name, rows in split.items()} for number in range(parts)]
    given = [mapped(lambda each: _on(device, each), one) for one in given]
    seeds = [0] * len(given)
    if len(given) > 1 and samples(module, arguments):
        seeds = torch.randint(2**63 - 1, (len(given),), device="cpu").tolist()
    return [GeneratedBatch(one, seed) for one, seed in zip(given, seeds, strict=True)]


def joined(results: Sequence[Any], module: Any, inputs: Any, parts: int, arguments: Mapping[str, Any]) -> Any:
    """Return the result of one batch, a list for a list of batches, and the rows of all parts of a batch."""
    if is_list(inputs):
        return list(results)
    if parts == 1:
        return results[0]
    longest = max(result.shape[1] for result in results)
    pad = _padding(module, arguments)
    if pad is None and any(result.shape[1] != longest for result in results):
        raise ValueError("the parts of the batch end at different lengths: give pad_token_id")
    return torch.cat([functional.pad(each, (0, longest - each.shape[1]), value=pad or 0) for each in results])


def plain_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``arguments`` with numbers in place of tensors that are settings, such as ``eos_token_id``."""
    fields = vars(GenerationConfig())
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) and name in fields else value
        for name, value in arguments.items()
    }


def _on(device: torch.device, value: Any) -> Any:
    """Return a tensor ``value`` on ``device``, as one that counts its changes; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone().to(device) if value.is_inference() else value.to(device)


def _tensors(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if has_tensors(value)}


def _padding(module: Any, arguments: Mapping[str, Any]) -> int | None:
    for name in ("pad_token_id", "eos_token_id"):
        value = setting(module, arguments, name)
        if value is not None:
            return int(value[0] if isinstance(value, list | tuple) else value)
    return None
