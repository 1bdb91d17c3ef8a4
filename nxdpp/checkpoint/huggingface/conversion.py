"""Conversions of transformers between the tensors of a file and the tensors of a model.

``from_pretrained`` renames tensors and adds or removes the prefix of the base model. It merges the tensors of experts,
and splits or transposes others. ``save_pretrained`` reverts that. As in ``transformers/core_model_loading.py``, the
conversions follow from only the names. So they and all shapes are known before a value is read.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from nxdpp.ground.transformers_names import CONVERSIONS


@dataclass(eq=False)
class Conversion:
    """Conversion that makes new tensors, the ``first`` of them by name, from source tensors.

    ``converter`` is of transformers; None for a rename of one source. ``renamings`` are applied to its results. Each of
    ``sources`` has the matched pattern of the converter and the name of a tensor.
    """

    first: str
    converter: Any | None = None
    renamings: list[Any] = field(default_factory=list)
    sources: list[tuple[str, str]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Names of the source tensors."""
        return [name for _, name in self.sources]

    def convert(self, tensor: Callable[[str], torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the new tensors by name, from the sources that ``tensor`` returns; also works on the meta device.

        The converter may raise any exception for shapes that it cannot convert.
        """
        if self.converter is None:
            return {self.first: tensor(self.names[0])}
        for pattern, name in self.sources:
            self.converter.add_tensor(self.first, name, pattern, tensor(name))
        made = self.converter.convert(self.first, model=model, config=model.config)
        values = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        return {apply_renamings(name, self.renamings): value.detach() for name, value in values.items()}


@dataclass(frozen=True)
class LoadingPlan:
    """Conversions of the tensors of a checkpoint.

    ``unexpected`` has the stored name of each converted name that the model lacks. ``used`` are transforms that matched
    a tensor, which ``save_pretrained`` must revert; ``None`` for any load's.
    """

    conversions: list[Conversion]
    unexpected: dict[str, str]
    used: list[Any] | None


def loading_plan(
    model: nn.Module, expected: dict[str, torch.Tensor], stored: Iterable[str], quantiser: Any | None = None
) -> LoadingPlan:
    """Plan the conversion of the ``stored`` tensors to tensors of ``model``, whose state dict is ``expected``.

    A model that is not from transformers must have the stored names. With a ``quantiser`` of transformers the
    conversions dequantise first.
    """
    transforms: list[Any] = []
    prefix: str | None = None
    if isinstance(model, PreTrainedModel):
        transforms, prefix = get_model_conversion_mapping(model, hf_quantizer=quantiser), model.base_model_prefix
    renamings, converters, by_pattern = _by_kind(transforms)
    conversions: dict[str, Conversion] = {}
    unexpected: dict[str, str] = {}
    for name in sorted(stored, key=dot_natural_key):
        new, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if new not in expected and name in expected:
            new, pattern = rename_source_key(name, [], [], prefix, expected)
        if new in expected:
            _add(conversions, new, name, pattern, by_pattern)
        else:
            unexpected[new] = name
    used = [each for each in transforms if each.was_used()] if quantiser is None else None
    return LoadingPlan(list(conversions.values()), unexpected, used)


def saving_conversions(model: nn.Module, names: Collection[str]) -> list[Conversion]:
    """Plan the conversion of the tensors ``names`` of ``model`` to what its ``save_pretrained`` would write."""
    transforms = _transforms_to_revert(model) if isinstance(model, PreTrainedModel) else []
    # Loading applied the transforms of submodels last.
    renamings, converters, by_pattern = _by_kind([transform.reverse_transform() for transform in reversed(transforms)])
    conversions: dict[str, Conversion] = {}
    for name in sorted(names, key=dot_natural_key):
        new, pattern = apply_converters(name, converters)
        if pattern is None:
            new = apply_renamings(name, renamings)
        _add(conversions, new, name, pattern, by_pattern, renamings)
    return list(conversions.values())


def _by_kind(transforms: list[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """The renamings, the converters, and the converters by their patterns."""
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    return renamings, converters, {pattern: each for each in converters for pattern in each.source_patterns}


def _transforms_to_revert(model: PreTrainedModel) -> list[Any]:
    used: list[Any] | None = getattr(model, CONVERSIONS.name, None)
    if used is not None:
        return used
    # Without loading no prefix was removed.
    every = get_model_conversion_mapping(model, add_legacy=False)
    return [transform for transform in every if not isinstance(transform, PrefixChange)]


def _add(
    conversions: dict[str, Conversion],
    new: str,
    name: str,
    pattern: str | None,
    by_pattern: Mapping[str, Any],
    renamings: Iterable[Any] = (),
) -> None:
    converter = None if pattern is None else by_pattern[pattern]
    conversion = conversions.get(new)
    if conversion is None:
        conversion = conversions[new] = Conversion(new, deepcopy(converter), list(renamings))
    elif conversion.converter is None:
        # The first of two names for one tensor counts, as in from_pretrained.
        return
    conversion.sources.append((pattern or name, name))
