"""Configuration file of a Hugging Face model, before transformers reads it. No torch is imported here."""

import json
from pathlib import Path
from typing import Any


def configuration_file(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file of ``path``, which may be its folder, and its content.

    Raises ``ValueError`` for a missing file, and for one that is not a JSON object with a ``model_type``.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        missing = "the folder has no config.json" if path.is_dir() else "no such file"
        raise ValueError(
            f"{path}: {missing}. Give a Hugging Face configuration file, or a folder with its config.json."
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}.") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        found = content.get("model_type") if isinstance(content, dict) else None
        raise ValueError(
            f"{file}: model_type is {found!r}. It must name a type of transformers (llama, qwen3, bert, ...)."
        )
    return file, content
