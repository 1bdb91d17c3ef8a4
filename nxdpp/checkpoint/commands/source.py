"""Model to convert: on the meta device, and its tensors read whole, one at a time, by the names of the model."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from nxdpp.checkpoint.distributed.model_state import ModelTensors, model_tensors
from nxdpp.checkpoint.files.pieces import StoredLayout, listed
from nxdpp.checkpoint.huggingface.read_directory import texts_in
from nxdpp.ground.torch_names import MODULES
from nxdpp.planning.configured_model import build_on_meta, read_configuration
from nxdpp.planning.dtypes import dtype_named

_SHOWN = 5
_ADAPTED = ("base_model.model.", "base_model.prompt_encoder.")


@dataclass(frozen=True)
class MetaModel:
    """A model on the meta device: of transformers, or another module with the names of the tensors.

    ``texts`` are files of its configuration by name; empty for any other module. ``tensors`` have ties.
    """

    module: nn.Module
    texts: dict[str, str]
    tensors: ModelTensors

    @property
    def tied_names(self) -> list[list[str]]:
        """The names of each tensor that has several."""
        groups: dict[str, list[str]] = {}
        for name, first in self.tensors.ties.items():
            groups.setdefault(first, [first]).append(name)
        return list(groups.values())

    def sources(self, shapes: Mapping[str, Sequence[int]], ties: Mapping[str, str], origin: Path) -> dict[str, str]:
        """Return the name in a checkpoint of each tensor of the model.

        ``shapes`` has the whole shape of each tensor of the checkpoint, and ``ties`` other names of its tied tensors,
        with the first one. ``origin`` is for errors. Raises ``ValueError`` for names and shapes that differ from the
        model's.
        """
        found = {name: ties.get(name, name) for name in self.tensors.tensors}
        missing = [name for name, source in found.items() if source not in shapes]
        unexpected = sorted(set(shapes) - set(found.values()))
        if missing or unexpected:
            lacks, has = (listed(names, _SHOWN) or "none" for names in (missing, unexpected))
            raise ValueError(
                f"{origin} does not have the tensors of {type(self.module).__name__}: {len(missing)} are missing "
                f"({lacks}), and {len(unexpected)} are unexpected ({has}). Give the configuration of its model: "
                f"--config DIR."
            )
        for name, source in found.items():
            expected = list(self.tensors.tensors[name].shape)
            if list(shapes[source]) != expected:
                raise ValueError(
                    f"{name} is of shape {list(shapes[source])} in {origin}, and of {expected} by the configuration: "
                    f"give that of its model, --config DIR."
                )
        return found


def meta_model(texts: Mapping[str, str] | None, config: Path | None, origin: Path) -> MetaModel:
    """Return the model of the configuration ``config``, a folder, or of the files ``texts``.

    Raises ``ValueError`` where both are missing, and for a configuration that is refused.
    """
    if config is not None:
        is_file = config.is_file()
        return _built(config, {"config.json": config.read_text(encoding="utf-8")} if is_file else texts_in(config))
    if not texts or "config.json" not in texts:
        raise ValueError(
            f"{origin} has no configuration of a transformers model: give one, --config DIR. For a module that is "
            f"not of transformers, give --plain: its tensors keep their names."
        )
    with tempfile.TemporaryDirectory() as folder_name:
        for name, text in texts.items():
            (Path(folder_name) / name).write_text(text, encoding="utf-8")
        try:
            return _built(Path(folder_name), dict(texts))
        except ValueError as error:
            raise ValueError(str(error).replace(folder_name, str(origin))) from error


def with_dtypes(model: MetaModel, layouts: Mapping[str, StoredLayout]) -> None:
    """Give the tensors of ``model`` the dtypes that they have in a checkpoint, by name."""
    for name, tensor in model.tensors.tensors.items():
        if tensor.dtype != layouts[name].dtype:
            tensor.data = tensor.data.to(layouts[name].dtype)


def _built(config: Path, texts: dict[str, str]) -> MetaModel:
    configuration = read_configuration(config)
    named = configuration.dtype
    module = build_on_meta(configuration, None if named is None else dtype_named(named))
    return MetaModel(module, texts, model_tensors(module))


class SourceOptimizer(NamedTuple):
    """Optimizer state to convert: its part of a checkpoint's content, and its tensors by their names there."""

    content: dict[str, Any]
    layouts: dict[str, StoredLayout]
    read: Callable[[str], torch.Tensor]


class Source(NamedTuple):
    """A model to convert, on the meta device; ``read`` returns the values of one of ``layouts``, by its name."""

    model: MetaModel
    layouts: dict[str, StoredLayout]
    read: Callable[[str], torch.Tensor]
    optimizer: SourceOptimizer | None = None


def check_free(destination: Path, *names: str) -> None:
    """Raise ``ValueError`` where ``destination`` has one of the files or directories ``names``."""
    if destination.exists() and not destination.is_dir():
        raise ValueError(f"{destination} is a file: give a directory.")
    found = [name for name in names if (destination / name).exists()]
    if found:
        raise ValueError(f"{destination} has {', '.join(found)} already: give another directory.")


def plain_model(layouts: Mapping[str, StoredLayout], ties: Mapping[str, str], origin: object) -> MetaModel:
    """Return a model with tensors of ``layouts``, and tied tensors also under their names in ``ties``.

    Raises ``ValueError`` for the tensors of a PEFT model, whose adapter has files of its own.
    """
    adapted = next((name for name in layouts if name.startswith(_ADAPTED)), None)
    if adapted is not None:
        raise ValueError(
            f"{origin} has the tensors of a PEFT model ({adapted}), and not the configuration of its adapter: load it "
            f"with nxdpp.load_checkpoint into the PeftModel, and write the adapter with nxdpp.save_pretrained."
        )
    module = nn.Module()
    made: dict[str, torch.Tensor] = {}
    for name in (*layouts, *ties):
        owner, key = module, name
        while "." in key:
            part, _, key = key.partition(".")
            if part not in MODULES.of(owner):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        first = ties.get(name, name)
        if first not in made:
            made[first] = layouts[first].on_meta()
        owner.register_buffer(key, made[first])
    return MetaModel(module, {}, model_tensors(module))
