"""Functions that a room below calls in a room above. ``nxdpp/__init__.py`` puts them here."""

from collections.abc import Callable
from typing import Any

save_pretrained: Callable[[Any, Any], None]
"""``nxdpp.save_pretrained``, which transformers makes a method of the model."""
