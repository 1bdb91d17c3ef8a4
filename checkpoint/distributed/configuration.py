"""Configuration of a transformers model, as the files that its ``save_pretrained`` writes beside the weights."""

import sys
import tempfile
from pathlib import Path

from torch import nn


def configuration_of(model: nn.Module) -> dict[str, str] | None:
    """Return the text of each file of the configuration by name.

    ``None`` for a module that is not of transformers, and for a configuration that transformers refuses to write: a
    training goes on without it, and a conversion asks for it.
    """
    module = getattr(model, "original_module", model)
    if "transformers" not in sys.modules:
        return None
    from nxdpp.checkpoint.huggingface.write_directory import write_configuration

    with tempfile.TemporaryDirectory() as folder:
        try:
            write_configuration(module, Path(folder))
        except ValueError:
            # Such as options of generation that contradict each other.
            return None
        return texts_in(Path(folder)) or None


def texts_in(folder: Path) -> dict[str, str]:
    """The text of each file of the configuration in ``folder``."""
    files = (folder / name for name in ("config.json", "generation_config.json"))
    return {file.name: file.read_text(encoding="utf-8") for file in files if file.is_file()}
