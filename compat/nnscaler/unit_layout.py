"""``UnitLayout``: the parallelism inside a unit. Policies make it, saved plans keep it, and parallel modules run it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

_LISTS = ("cuts", "layer_classes", "recompute")


@dataclass(frozen=True)
class UnitLayout:
    """Division of a module over the ranks of a unit, ``tensor * pipeline`` of them.

    Attributes:
        tensor: number of ranks that share each layer.
        pipeline: number of ranks of the pipeline.
        chunks: number of stages of each rank of the pipeline.
        schedule: schedule of the pipeline by nxdpp's name. ``None`` without a pipeline.
        microbatches: number of samples of a step. ``None`` without a pipeline: any number.
        cuts: names of the layers after which to cut, one fewer than stages.
        layer_classes: names of the classes of these layers. Empty for those that nxdpp finds by itself.
        plan: styles of ``nxdpp.tensor_parallelize`` by name pattern, which ``generic_plan.compare`` compares with one
            process. ``None`` for the module's own plan.
        recompute: names of the modules that recompute their forward in the backward.
    """

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    schedule: str | None = None
    microbatches: int | None = None
    cuts: tuple[str, ...] = ()
    layer_classes: tuple[str, ...] = ()
    plan: Mapping[str, str] | None = None
    recompute: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks of the unit."""
        return self.tensor * self.pipeline

    @property
    def is_pipeline(self) -> bool:
        """``True`` for a layout with several stages."""
        return self.pipeline * self.chunks > 1

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values of JSON."""
        return {**asdict(self), **{name: list(getattr(self, name)) for name in _LISTS}}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return the layout of ``to_dict``. Raises ``TypeError`` and ``KeyError`` for another content."""
        return cls(**{**fields, **{name: tuple(fields[name]) for name in _LISTS}})


def write_layout(layout: UnitLayout, path: Path) -> None:
    """Write ``layout`` to a JSON file."""
    path.write_text(json.dumps(layout.to_dict(), indent=1) + "\n")


def read_layout(path: Path) -> UnitLayout:
    """Return the layout of ``write_layout``. Raises ``ValueError`` for a missing file, and for another content."""
    try:
        return UnitLayout.from_dict(json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise ValueError(f"there is no layout {path}: write it with save_plan_path") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no layout of a unit ({error}): write it with save_plan_path") from error
