"""Configuration of ``initialize``: a dict or a JSON file with OSLO's sections and keys, verified."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SECTION = "model_parallelism"
_KEYS = ("enable", "tensor_parallel_size", "pipeline_parallel_size")
REFUSED = {
    "pipeline_parallel_size": "leave it out, and give the model to nxdpp.NxDPPModel, which is a pipeline",
    "num_microbatches": "leave it out, and give it to nxdpp.NxDPPModel, which is a pipeline",
    "activation_checkpointing": "leave it out, and call gradient_checkpointing_enable() of the model",
    "kernel_fusion": "leave it out, and call compile() of the model after initialize",
}
"""Keys, sections and arguments that ``initialize`` does not honour, with what takes their place."""


def tensor_parallel_size_of(config: Mapping[str, Any] | str | os.PathLike[str]) -> int:
    """Return the number of ranks that share each layer by ``config``, a dict or the path of a JSON file.

    Raises:
        TypeError: for a configuration, section or value of the wrong type.
        ValueError: for an unknown section or key, an empty configuration, a size below 1, keys of a section without
            ``"enable": true``, and what ``REFUSED`` names.
        OSError: for a file that cannot be read.
    """
    sections = _sections(config)
    if not sections:
        raise ValueError(f'the configuration is empty: give the section "{_SECTION}"')
    for name, section in sections.items():
        if name != _SECTION and name not in REFUSED:
            raise ValueError(f"the configuration has the unknown section {name!r}: give {_SECTION}")
        if not isinstance(section, Mapping):
            raise TypeError(f'"{name}" must be a dict of keys and values, not {section!r:.80}')
        if name != _SECTION:
            check_not_given(name, dict(section), any(section.values()))
    parallelism = sections.get(_SECTION, {})
    for key, value in parallelism.items():
        _check_value(key, value)
    size: int = parallelism.get("tensor_parallel_size", 1)
    pipeline = parallelism.get("pipeline_parallel_size", 1)
    check_not_given("pipeline_parallel_size", pipeline, pipeline > 1)
    if size > 1 and not parallelism.get("enable"):
        raise ValueError(
            f'"{_SECTION}" has no "enable": true, so tensor_parallel_size={size} would do nothing: add it, or leave '
            f"tensor_parallel_size out"
        )
    return size


def check_not_given(name: str, value: Any, is_given: bool) -> None:
    """Raise ``ValueError`` for a ``value`` of ``name`` that would have an effect, with what takes its place."""
    if is_given:
        raise ValueError(f"{name}={value!r:.80} is not honoured: {REFUSED[name]}")


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


def _check_value(key: str, value: Any) -> None:
    place = f'"{_SECTION}": {key}'
    if key not in _KEYS:
        raise ValueError(f'"{_SECTION}" has the unknown key {key!r}: its keys are {", ".join(_KEYS)}')
    if (key == "enable") != isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{place} must be {'true or false' if key == 'enable' else 'a whole number'}, not {value!r:.80}"
        )
    if key != "enable" and value < 1:
        raise ValueError(f"{place} is {value}: it must be 1 or more")
