"""Keys of a JSON document, and those that a page lists between its marks."""

import re
from pathlib import Path
from typing import Any

# Keys of these are names of inputs or numbers of ranks.
_FREE = ("sample", "refused")


def keys_of(document: dict[str, Any]) -> set[str]:
    """Return all keys of ``document``, those of objects in it too."""
    found: set[str] = set()
    for key, value in document.items():
        found.add(key)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict) and key not in _FREE:
                found |= keys_of(each)
    return found


def keys_in(page: Path) -> set[str]:
    """Return the words in backquotes between the marks ``json keys`` and ``end of json keys``."""
    text = page.read_text(encoding="utf-8").split("<!-- json keys -->")[1].split("<!-- end of json keys -->")[0]
    return set(re.findall(r"`([a-z0-9_]+)`", text))
