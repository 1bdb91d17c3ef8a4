"""The model of a configuration, without memory, and the names that a checkpoint must have for it."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from nxdpp.checkpoint.distributed.configuration import texts_in
from nxdpp.checkpoint.distributed.model_state import ModelTensors, model_tensors
from nxdpp.checkpoint.files.layout import Layout
from nxdpp.pipeline.planning.configured_model import build_on_meta, read_configuration
from nxdpp.pipeline.planning.dtypes import dtype_named

_SHOWN = 5


@dataclass(frozen=True)
class MetaModel:
    """A model on the meta device.

    Attributes:
        module: a transformers model, or another module with the names of the tensors.
        texts: files of its configuration by name; empty for another module.
        tensors: its tensors, with ties.
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

        Args:
            shapes: whole shape of each tensor of the checkpoint.
            ties: other names of its tied tensors, with the first one.
            origin: of the checkpoint, for errors.

        Raises ``ValueError`` for names and shapes that are not those of the model.
        """
        found = {name: ties.get(name, name) for name in self.tensors.tensors}
        missing = [name for name, source in found.items() if source not in shapes]
        unexpected = sorted(set(shapes) - set(found.values()))
        if missing or unexpected:
            kind = type(self.module).__name__
            raise ValueError(
                f"{origin} does not have the tensors of {kind}: {len(missing)} are missing ({_listed(missing)}), and "
                f"{len(unexpected)} are unexpected ({_listed(unexpected)}). Give the configuration of its model: "
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


def with_dtypes(model: MetaModel, layouts: Mapping[str, Layout]) -> None:
    """Give the tensors of ``model`` the dtypes of those in a checkpoint, by name."""
    for name, tensor in model.tensors.tensors.items():
        if tensor.dtype != layouts[name].dtype:
            tensor.data = tensor.data.to(layouts[name].dtype)


def _built(config: Path, texts: dict[str, str]) -> MetaModel:
    configuration = read_configuration(config)
    named = configuration.dtype
    module = build_on_meta(configuration, None if named is None else dtype_named(named))
    return MetaModel(module, texts, model_tensors(module))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) or "none") + more
