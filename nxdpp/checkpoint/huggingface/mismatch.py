"""Comparison of a checkpoint with a model: one error for all differences, or a report of those that a load accepts."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from nxdpp.checkpoint.files.pieces import listed, printable
from nxdpp.checkpoint.files.safetensors_reader import StoredTensor
from nxdpp.checkpoint.huggingface.conversion import Conversion, LoadingPlan
from nxdpp.checkpoint.huggingface.load_target import Target
from nxdpp.ground.transformers_names import ADJUST_KEYS

_SHOWN = 10
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
_LONGEST_NAME = 300


class OtherShape(NamedTuple):
    """A tensor that has different shapes in the checkpoint and in the model."""

    name: str
    stored: tuple[int, ...]
    expected: tuple[int, ...]

    def __str__(self) -> str:
        shapes = f"{list(self.stored)} in the checkpoint, {list(self.expected)} in the model"
        return f"{printable(self.name, _LONGEST_NAME)} ({shapes})"


@dataclass(frozen=True)
class LoadReport:
    """Differences between a checkpoint and the whole model that it was loaded into; equal on all ranks.

    It is true if there is any difference.

    Attributes:
        missing: names of the model's tensors that the checkpoint lacks. They have initial weights.
        unexpected: names of the files' tensors that the model lacks. They were left out.
        mismatched: tensors of a different shape. The model's have initial weights.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[OtherShape, ...] = ()

    @property
    def initialised(self) -> tuple[str, ...]:
        """Names of the model's tensors that have initial weights."""
        return (*self.missing, *(each.name for each in self.mismatched))

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        """A line for each kind; names that differ in a layer's number are one, with ``*`` and their count."""
        lines = {
            "missing, with initial weights": list(_grouped(self.missing)),
            "unexpected, left out": list(_grouped(self.unexpected)),
            "of another shape, with initial weights": list(map(str, self.mismatched)),
        }
        counts = (len(self.missing), len(self.unexpected), len(self.mismatched))
        return "\n".join(
            f"  {count} {kind}: {', '.join(names)}"
            for count, (kind, names) in zip(counts, lines.items(), strict=True)
            if count
        )


@dataclass(frozen=True)
class Accepted:
    """Differences that a load accepts: in names, shapes, and the width of floating tensors, which are converted."""

    names: bool = False
    shapes: bool = False
    widths: bool = False


@dataclass
class Fit:
    """Result of the comparison.

    Attributes:
        provided: the conversion that makes each tensor of the model.
        missing: tensors of the model that the checkpoint lacks.
        unexpected: tensors of the checkpoint that the model lacks.
        misshaped: tensors of a different shape.
        unmade: texts about tensors that the stored ones cannot be converted to.
        mistyped: texts about tensors whose dtype cannot give the values of the model.
        widths: texts about floating tensors of a different width.
        used: transforms that ``save_pretrained`` must revert.
    """

    provided: dict[str, Conversion] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: list[OtherShape] = field(default_factory=list)
    unmade: list[str] = field(default_factory=list)
    mistyped: list[str] = field(default_factory=list)
    widths: list[str] = field(default_factory=list)
    used: list[Any] | None = None

    def report(self, copies: Collection[str]) -> LoadReport:
        """The differences that a load has accepted, without tensors that are ``copies``."""
        missing = tuple(name for name in self.missing if name not in copies)
        misshaped = tuple(each for each in self.misshaped if each.name not in copies)
        return LoadReport(missing, tuple(self.unexpected), misshaped)


def fit(target: Target, stored: Mapping[str, StoredTensor], plan: LoadingPlan) -> Fit:
    """Compare the tensors that ``plan`` makes from ``stored`` with the tensors of ``target``.

    Conversions run on the meta device, so no values are read. The checkpoint needs one of the names of each tied
    weight. Tensors that the module allows to be missing or unexpected are left out.
    """
    expected, found = target.expected, Fit(used=plan.used)
    unexpected = dict(plan.unexpected)
    present: set[str] = set()
    for conversion in plan.conversions:
        try:
            made = conversion.convert(lambda name: stored[name].on_meta(), target.module)
        except Exception as error:
            shapes = ", ".join(f"{printable(name)} {list(stored[name].shape)}" for name in conversion.names[:_SHOWN])
            reason = printable(error, 500)
            found.unmade.append(f"{conversion.first} (cannot be made of {shapes}: {reason})")
            present.add(conversion.first)
            continue
        for name, tensor in made.items():
            if name not in expected:
                unexpected[name] = conversion.names[0]
                continue
            present.add(name)
            if tensor.shape == expected[name].shape:
                found.provided[name] = conversion
            else:
                found.misshaped.append(OtherShape(name, tuple(tensor.shape), tuple(expected[name].shape)))
            _compare_dtypes(found, name, tensor.dtype, expected[name].dtype)
    missing = expected.keys() - present
    for names in target.tied_names:
        if any(name in present for name in names):
            missing -= set(names)
        if any(name in found.provided for name in names):
            # One name has the values of the tied weight, so a different shape under a second name is no initial weight.
            other = [each for each in found.misshaped if each.name in names]
            found.misshaped = [each for each in found.misshaped if each not in other]
            found.unmade += [f"{each}, tied to a name of the right shape" for each in other]
    missing, unexpected = _not_ignored(target.module, missing, unexpected)
    found.missing = [name for name in expected if name in missing]
    found.unexpected = list(dict.fromkeys(unexpected.values()))
    return found


def check_fits(found: Fit, accepted: Accepted, kind: str, directory: Path, remedy: str) -> None:
    """Raise one ``ValueError`` with all differences that are not ``accepted``, and ``remedy``.

    ``kind`` is the class of the model.

    A checkpoint that gives the model no tensor at all is never accepted.
    """
    names = {} if accepted.names else {"missing": found.missing, "unexpected": found.unexpected}
    shapes = found.unmade + ([] if accepted.shapes else list(map(str, found.misshaped)))
    kinds = {**names, "of another shape": shapes, "of another dtype": found.mistyped}
    if not accepted.widths:
        kinds["of another float width"] = found.widths
    if not any(kinds.values()):
        if not found.provided and (found.missing or found.unexpected or found.misshaped):
            raise ValueError(
                f"{directory} has no tensor of this {kind}: its names are "
                f"{listed(found.unexpected)}. Nothing was loaded. {remedy}"
            )
        return
    always = ("missing", "unexpected", "of another shape")
    counts = ", ".join(f"{len(texts)} {kind}" for kind, texts in kinds.items() if texts or kind in always)
    lists = "".join(f"\n  {kind}: {listed(texts)}" for kind, texts in kinds.items() if texts)
    raise ValueError(
        f"the tensors in {directory} are not those of this {kind}: {counts}.{lists}\n"
        f"Nothing was loaded. {_remedies(found, accepted, remedy)}"
    )


def _remedies(found: Fit, accepted: Accepted, remedy: str) -> str:
    """Remedies for the differences that are not ``accepted``."""
    names = not accepted.names and bool(found.missing or found.unexpected)
    shapes = not accepted.shapes and bool(found.misshaped)
    remedies = [remedy] if names or shapes or found.unmade or found.mistyped else []
    if names:
        remedies.append(
            "Or give strict=False: unexpected tensors are then left out, and missing ones have initial weights."
        )
    if shapes:
        remedies.append("ignore_mismatched_sizes=True gives initial weights to tensors of another shape.")
    if found.mistyped:
        remedies.append(
            "Tensors of another dtype are not weights of this model: convert them in the files, if they are."
        )
    if found.widths and not accepted.widths:
        remedies.append(
            "Give convert_dtype=True to convert floats to the dtypes of the model, or wrap the model in the dtype of "
            "the files: model.to(torch.bfloat16)."
        )
    return " ".join(remedies)


def _compare_dtypes(found: Fit, name: str, stored: torch.dtype, expected: torch.dtype) -> None:
    text = f"{printable(name, 300)} ({stored} in the checkpoint, {expected} in the model)"
    if not _converts(stored, expected):
        found.mistyped.append(text)
    elif stored != expected and (expected.is_floating_point or expected.is_complex):
        found.widths.append(text)


def _not_ignored(model: nn.Module, missing: set[str], unexpected: dict[str, str]) -> tuple[set[str], dict[str, str]]:
    if not isinstance(model, PreTrainedModel):
        return missing, unexpected
    information: Any = SimpleNamespace(missing_keys=missing, unexpected_keys=set(unexpected))
    ADJUST_KEYS.of(model)(information)
    kept = {name: source for name, source in unexpected.items() if name in information.unexpected_keys}
    return information.missing_keys, kept


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


def _grouped(names: Iterable[str]) -> Iterable[str]:
    counts: dict[str, list[str]] = {}
    for name in names:
        counts.setdefault(_NUMBER.sub("*", name), []).append(name)
    for pattern, members in counts.items():
        shown = printable(members[0] if len(members) == 1 else pattern, _LONGEST_NAME)
        yield shown if len(members) == 1 else f"{shown} ({len(members)})"
