"""Functions and modules of a stage's graph on a device with streams, whose questions the host's inputs answer.

::

    arange ── unsqueeze ── create_causal_mask(embeddings, mask, positions)
    FollowedCall           AnsweredCall: (positions[:, 1:] - positions[:, :-1] != 1).any()
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from nxdpp.devices.host_answers import HostAnswers, have_host_copies, note_call
from nxdpp.tracing.graph.calls import OpaqueCall
from nxdpp.tracing.models.huggingface import asks_for_positions


class _NamedCall:
    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.__name__ = getattr(call, "__name__", type(call).__name__)


class AnsweredCall(_NamedCall):
    """``call`` of a function or a module, for which the host waits for no input of the step (``host_answers``)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and answer its questions."""
        if not have_host_copies((*args, *kwargs.values())):
            return self._call(*args, **kwargs)
        with HostAnswers():
            return self._call(*args, **kwargs)


class FollowedCall(_NamedCall):
    """``call`` of a function, whose results the host can compute too."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and note the call."""
        result = self._call(*args, **kwargs)
        note_call(result, self._call, args, kwargs)
        return result


def answer_questions(copied: fx.Node, original: fx.Node, root: nn.Module) -> None:
    """Let the host answer the questions of ``copied``, the node of a stage for ``original`` of the whole graph."""
    if _asks(original, root):
        call: Any = root.get_submodule(str(copied.target)) if copied.op == "call_module" else copied.target
        copied.op, copied.target = "call_function", AnsweredCall(call)
    elif copied.op in ("call_function", "call_method") and _leads_to_call(original, root):
        is_method = copied.op == "call_method"
        function: Any = getattr(torch.Tensor, str(copied.target)) if is_method else copied.target
        copied.target = FollowedCall(function)
        copied.op = "call_function"


def _asks(node: fx.Node, root: nn.Module) -> bool:
    """Return whether ``node`` calls a function, which may ask for values, or a module that is known to."""
    if node.op == "call_module":
        return asks_for_positions(root.get_submodule(str(node.target)))
    return isinstance(node.target, OpaqueCall)


def _leads_to_call(node: fx.Node, root: nn.Module) -> bool:
    pending, seen = list(node.users), set()
    while pending:
        user = pending.pop()
        if _asks(user, root):
            return True
        if user not in seen and user.op in ("call_function", "call_method"):
            seen.add(user)
            pending += user.users
    return False
