"""Configuration of ``initialize``: a dict or a JSON file with OSLO's sections and keys, verified."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")
_CHECKPOINTING = ("cpu_checkpointing", "partitioned_checkpointing", "contiguous_checkpointing")
_FUSION = ("memory_efficient_fusion", "custom_cuda_kernels")
_KERNELS = ("FusedRMSNorm", "FusedNoRepeatNGram")
_KEYS = {
    "model_parallelism": ("enable", *_SIZES),
    "activation_checkpointing": ("enable", *_CHECKPOINTING),
    "kernel_fusion": ("enable", *_FUSION),
}


@dataclass(frozen=True)
class OsloConfig:
    """The settings of a configuration.

    Attributes:
        tensor_parallel_size: number of ranks that share each layer.
        pipeline_parallel_size: number of ranks in a pipeline.
        checkpoints: recompute the forward of layers during their backward.
        to_cpu: keep the inputs of checkpointed layers in host memory.
        partitions: each tensor-parallel rank keeps a part of the input of a checkpointed layer.
        contiguous: the parts of all layers of a list get their memory together.
        fuses: compile the activation functions.
        fuses_model: compile the whole model.
        kernels: names of OSLO's kernels, each once or more.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    checkpoints: bool = False
    to_cpu: bool = False
    partitions: bool = False
    contiguous: bool = False
    fuses: bool = False
    fuses_model: bool = False
    kernels: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any] | str | os.PathLike[str]) -> Self:
        """Return the settings of ``config``, a dict or the path of a JSON file.

        Raises:
            TypeError: for a configuration, section or value of the wrong type.
            ValueError: for an unknown section, key or kernel, an empty configuration, a size below 1, keys of a section
                without ``"enable": true``, and settings that exclude each other.
            OSError: for a file that cannot be read.
        """
        sections = _sections(config)
        if not sections:
            raise ValueError(f"the configuration is empty: give a section, {' or '.join(_KEYS)}")
        for name, section in sections.items():
            _check_section(name, section)
        parallelism = sections.get("model_parallelism", {})
        checkpointing = sections.get("activation_checkpointing", {})
        fusion = sections.get("kernel_fusion", {})
        result = cls(
            **{key: parallelism[key] for key in _SIZES if key in parallelism},
            checkpoints=checkpointing.get("enable", False),
            to_cpu=checkpointing.get("cpu_checkpointing", False),
            partitions=checkpointing.get("partitioned_checkpointing", False),
            contiguous=checkpointing.get("contiguous_checkpointing", False),
            fuses=fusion.get("enable", False),
            fuses_model=fusion.get("memory_efficient_fusion", False),
            kernels=tuple(fusion.get("custom_cuda_kernels", ())),
        )
        result._check_together()
        return result

    def _check_together(self) -> None:
        if self.partitions and self.tensor_parallel_size == 1:
            raise ValueError(
                '"partitioned_checkpointing" divides hidden states over tensor-parallel ranks, and '
                "tensor_parallel_size is 1: leave it out"
            )
        if self.contiguous and not self.partitions:
            raise ValueError(
                '"contiguous_checkpointing" is for the parts of hidden states: add "partitioned_checkpointing": true, '
                "or leave it out"
            )
        if self.fuses_model and (self.checkpoints or self.tensor_parallel_size * self.pipeline_parallel_size > 1):
            raise ValueError(
                '"memory_efficient_fusion" compiles the whole model and chooses itself what is recomputed, as in OSLO '
                "without model parallelism and activation checkpointing: leave it out, or these two sections"
            )


def _sections(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str | os.PathLike):
        raise TypeError(f"the configuration must be a dict or the path of a JSON file, not {config!r:.80}")
    try:
        sections = json.loads(Path(config).read_text(encoding="utf-8"), object_pairs_hook=_section)
    except ValueError as error:
        raise ValueError(f"{os.fspath(config)} is no JSON file: {error}") from None
    if not isinstance(sections, dict):
        raise TypeError(f"{os.fspath(config)} has a {type(sections).__name__}: it must have an object of sections")
    return sections


def _section(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file. Python's reader takes the last of two values for one key."""
    section = dict(pairs)
    if len(section) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return section


def _check_section(name: str, section: Any) -> None:
    if name not in _KEYS:
        raise ValueError(f"the configuration has the unknown section {name!r}: its sections are {', '.join(_KEYS)}")
    if not isinstance(section, Mapping):
        raise TypeError(f'"{name}" must be a dict of {", ".join(_KEYS[name])}, not {section!r:.80}')
    if unknown := [key for key in section if key not in _KEYS[name]]:
        raise ValueError(f'"{name}" has the unknown key {unknown[0]!r}: its keys are {", ".join(_KEYS[name])}')
    for key, value in section.items():
        _check_value(f'"{name}": {key}', key, value)
    given = [key for key, value in section.items() if key != "enable" and (value > 1 if key in _SIZES else value)]
    if given and not section.get("enable"):
        raise ValueError(
            f'"{name}" has no "enable": true, so {given[0]}={section[given[0]]} would do nothing: add it, or leave '
            f"{given[0]} out"
        )


def _check_value(place: str, key: str, value: Any) -> None:
    if key in _SIZES:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{place} must be a whole number, not {value!r:.80}")
        if value < 1:
            raise ValueError(f"{place} is {value}: it must be 1 or more")
    elif key == "custom_cuda_kernels":
        if not isinstance(value, list | tuple):
            raise TypeError(f"{place} must be a list of names, {' or '.join(_KERNELS)}, not {value!r:.80}")
        if unknown := [name for name in value if name not in _KERNELS]:
            raise ValueError(f"{place} names {unknown[0]!r}: the kernels are {' and '.join(_KERNELS)}")
    elif not isinstance(value, bool):
        raise TypeError(f"{place} must be true or false, not {value!r:.80}")
