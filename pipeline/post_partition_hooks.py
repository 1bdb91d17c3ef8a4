"""What a user does to the wrapped model once it is cut: freezing, LoRA, casting, activation checkpointing."""

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxdpp.pipeline.model import NxDPPModel

PostPartitionHook = Callable[["NxDPPModel"], None]


def checked_hooks(hooks: Any) -> tuple[PostPartitionHook, ...]:
    """``post_partition_hooks`` as a tuple. Raises ``TypeError`` unless they are functions in a list."""
    if hooks is None:
        return ()
    if not isinstance(hooks, Iterable):
        raise TypeError(f"post_partition_hooks={hooks!r} must be a list of functions of the wrapped model.")
    found = tuple(hooks)
    for number, hook in enumerate(found):
        if not callable(hook):
            raise TypeError(
                f"post_partition_hooks[{number}] is {hook!r}, which cannot be called. Each is given the wrapped model, "
                f"as in post_partition_hooks=[apply_checkpoint]."
            )
    return found


def call_hooks(hooks: Iterable[PostPartitionHook], model: "NxDPPModel") -> None:
    """Call ``hooks`` in order; what one of them raises has a note that names it."""
    for number, hook in enumerate(hooks):
        try:
            hook(model)
        except Exception as error:
            error.add_note(f"raised by post_partition_hooks[{number}], {_name(hook)}, on pipeline rank {model.rank}")
            raise


def _name(hook: Any) -> str:
    function = hook.func if isinstance(hook, functools.partial) else hook
    return getattr(function, "__qualname__", None) or type(function).__qualname__
