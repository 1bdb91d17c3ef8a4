"""Values of a dictionary that are others for a while."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def swapped(dictionary: dict[str, Any], changes: Mapping[str, Any]) -> Iterator[None]:
    """Have ``changes`` in ``dictionary``, an object's ``__dict__`` or a module's globals, and then the old values.

    A name that was not there is gone afterwards.
    """
    originals = {name: dictionary[name] for name in changes if name in dictionary}
    dictionary.update(changes)
    try:
        yield
    finally:
        for name in changes.keys() - originals.keys():
            del dictionary[name]
        dictionary.update(originals)
