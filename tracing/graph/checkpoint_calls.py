"""Calls of ``checkpoint`` outside layers: traced through, their activations are kept in a stage."""

import functools
import logging
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from torch.utils import checkpoint

from nxdpp.tracing.graph.errors import calling_line, model_line
from nxdpp.tracing.graph.swap import swapped_in_this_thread

_logger = logging.getLogger(__name__)
_NAME = "_checkpoint_without_reentrant_generator"


def told_checkpoints() -> AbstractContextManager[None]:
    """Log a warning, once for each line, for a call of ``checkpoint`` in the spine; its numbers are the same.

    A layer of transformers gives its own call (a ``partial``), which each run of the layer repeats.
    """
    namespace = vars(checkpoint)
    original = namespace[_NAME]

    def generator(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(function, functools.partial):
            _warn_once(model_line(calling_line()))
        return original(function, *args, **kwargs)

    return swapped_in_this_thread(namespace, {_NAME: generator})


@cache
def _warn_once(line: str) -> None:
    _logger.warning(
        "forward calls checkpoint outside the transformer layers; a stage keeps the activations that it would "
        "recompute\n  at %s\nCall the layers plainly, and nxdpp.apply_checkpoint(model) once after wrapping",
        line,
    )
