"""Functions that change the wrapped model after it is cut: freezing, LoRA, casting, activation checkpointing."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

PostPartitionHook = Callable[[Any], None]
"""A function of the wrapped model."""


def checked_hooks(hooks: Any) -> tuple[PostPartitionHook, ...]:
    """Return ``post_partition_hooks`` as a tuple. Raises ``TypeError`` unless they are a list of functions."""
    if hooks is None:
        return ()
    if not isinstance(hooks, Iterable):
        raise TypeError(f"post_partition_hooks={hooks!r} must be a list of functions of the wrapped model.")
    found = tuple(hooks)
    for number, hook in enumerate(found):
        if not callable(hook):
            raise TypeError(
                f"post_partition_hooks[{number}] is {hook!r}, which cannot be called. Give functions of the wrapped "
                f"model, as in post_partition_hooks=[apply_checkpoint]."
            )
    return found


def call_hooks(hooks: Iterable[PostPartitionHook], model: Any, rank: int) -> None:
    """Call ``hooks`` in order. An error gets a note with the hook and the pipeline ``rank``."""
    for number, hook in enumerate(hooks):
        try:
            hook(model)
        except Exception as error:
            error.add_note(f"raised by post_partition_hooks[{number}], {_name(hook)}, on pipeline rank {rank}")
            raise


def _name(hook: Any) -> str:
    function = hook.func if isinstance(hook, functools.partial) else hook
    return getattr(function, "__qualname__", None) or type(function).__qualname__
