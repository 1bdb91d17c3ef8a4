"""Comparison of a checkpoint with a model, and one error for all differences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nxdpp.checkpoint.files.printable import printable
from nxdpp.checkpoint.files.safetensors_reader import StoredTensor
from nxdpp.checkpoint.huggingface.conversion import Conversion, LoadingPlan

_SHOWN = 10


@dataclass
class Fit:
    """Result of the comparison.

    Attributes:
        provided: the conversion that makes each tensor of the model.
        missing: tensors of the model that the checkpoint lacks.
        unexpected: tensors of the checkpoint that the model lacks.
        misshaped: texts about tensors of another shape.
        mistyped: texts about tensors of a dtype from which the values of the model do not follow.
    """

    provided: dict[str, Conversion] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)
    mistyped: list[str] = field(default_factory=list)


def fit(
    model: nn.Module,
    expected: Mapping[str, torch.Tensor],
    tied_names: Sequence[Sequence[str]],
    stored: Mapping[str, StoredTensor],
    plan: LoadingPlan,
) -> Fit:
    """Compare the tensors that ``plan`` makes from ``stored`` with the ``expected`` state dict of ``model``.

    Conversions run on the meta device, so no values are read. The checkpoint needs one of the names of each tied
    weight. Tensors that ``model`` allows to be missing or unexpected are left out.
    """
    found = Fit()
    unexpected = dict(plan.unexpected)
    for conversion in plan.conversions:
        try:
            made = conversion.convert(lambda name: stored[name].on_meta(), model)
        except Exception as error:
            shapes = ", ".join(f"{printable(name)} {list(stored[name].shape)}" for name in conversion.names[:_SHOWN])
            reason = printable(error, 500)
            found.misshaped.append(f"{conversion.first} (cannot be made of {shapes}: {reason})")
            found.provided[conversion.first] = conversion
            continue
        for name, tensor in made.items():
            if name not in expected:
                unexpected[name] = conversion.names[0]
                continue
            found.provided[name] = conversion
            if tensor.shape != expected[name].shape:
                shapes = f"{list(tensor.shape)} in the checkpoint, {list(expected[name].shape)} in the model"
                found.misshaped.append(f"{name} ({shapes})")
            if not _converts(tensor.dtype, expected[name].dtype):
                dtypes = f"{tensor.dtype} in the checkpoint, {expected[name].dtype} in the model"
                found.mistyped.append(f"{name} ({dtypes})")
    missing = expected.keys() - found.provided.keys()
    for names in tied_names:
        if any(name in found.provided for name in names):
            missing -= set(names)
    missing, unexpected = _not_ignored(model, missing, unexpected)
    found.missing = [name for name in expected if name in missing]
    found.unexpected = list(dict.fromkeys(unexpected.values()))
    return found


def check_fits(found: Fit, model: nn.Module, directory: Path, remedy: str) -> None:
    """Raise one ``ValueError`` with all tensors that are missing, unexpected or do not fit, and ``remedy``."""
    kinds = {"missing": found.missing, "unexpected": found.unexpected, "of another shape": found.misshaped}
    if found.mistyped:
        kinds["of another dtype"] = found.mistyped
    if not any(kinds.values()):
        return
    if found.mistyped:
        remedy += " Tensors of another dtype are not weights of this model: convert them in the files, if they are."
    counts = ", ".join(f"{len(names)} {kind}" for kind, names in kinds.items())
    lists = "".join(f"\n  {kind}: {_listed(names)}" for kind, names in kinds.items() if names)
    raise ValueError(
        f"the tensors in {directory} are not those of this {type(model).__name__}: {counts}.{lists}\n"
        f"Nothing was loaded. {remedy}"
    )


def _not_ignored(model: nn.Module, missing: set[str], unexpected: dict[str, str]) -> tuple[set[str], dict[str, str]]:
    if not isinstance(model, PreTrainedModel):
        return missing, unexpected
    information: Any = SimpleNamespace(missing_keys=missing, unexpected_keys=set(unexpected))
    model._adjust_missing_and_unexpected_keys(information)
    kept = {name: source for name, source in unexpected.items() if name in information.unexpected_keys}
    return information.missing_keys, kept


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(printable(name, 300) for name in names[:_SHOWN]) + more


def _converts(stored: torch.dtype, expected: torch.dtype) -> bool:
    """Return whether values of ``stored`` are values for ``expected``, to rounding: both are of one kind."""
    if stored == expected:
        return True
    if expected.is_floating_point:
        # Values of 8 bits need scales.
        return stored.is_floating_point and stored.itemsize > 1
    if expected.is_complex:
        return stored.is_complex
    kinds = stored.is_floating_point or stored.is_complex
    return not kinds and torch.bool not in (stored, expected)
