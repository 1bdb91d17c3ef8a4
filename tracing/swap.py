"""Values of a dictionary that are others for a while."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def swapped(dictionary: dict[str, Any], changes: Mapping[str, Any]) -> Iterator[None]:
    """Have ``changes`` in ``dictionary``, an object's ``__dict__`` or a module's globals, and then the old values."""
    originals = {name: dictionary[name] for name in changes}
    dictionary.update(changes)
    try:
        yield
    finally:
        dictionary.update(originals)
