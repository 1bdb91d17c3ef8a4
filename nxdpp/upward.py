"""Functions that a room below calls in a room above. ``nxdpp/__init__.py`` puts them here."""

from collections.abc import Callable, Sequence
from typing import Any

save_pretrained: Callable[[Any, Any], None]
"""``nxdpp.save_pretrained``, which transformers makes a method of the model."""

move_model_to_device: Callable[[Any, Any], None]
"""``nxdpp.parallel_layers.move_model_to_device``, which NxD's API guide lists under ``parallel_state``."""

generate: Callable[[Any, Sequence[Any], int, Any], Any]
"""``generate`` of ``nxdpp.generation``, for a pipeline, arguments by position, parts, and arguments by name."""
