"""Functions of a stage's graph on a device with streams, whose questions the host's inputs answer.

::

    arange ── unsqueeze ── create_causal_mask(embeddings, mask, positions)
    FollowedCall           AnsweredCall: (positions[:, 1:] - positions[:, :-1] != 1).any()
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from nxdpp.devices.host_answers import HostAnswers, have_host_copies, note_call
from nxdpp.tracing.graph.calls import OpaqueCall


class AnsweredCall(OpaqueCall):
    """``call``, for which the host waits for no input of the step (``host_answers``)."""

    def __init__(self, call: OpaqueCall) -> None:
        vars(self).update(vars(call))
        self._call = call

    def __call__(self, *traced: Any) -> Any:
        """Call the function with the static arguments in their places."""
        if not have_host_copies(traced):
            return self._call(*traced)
        with HostAnswers():
            return self._call(*traced)


class FollowedCall:
    """``function``, whose results the host can compute too."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and note the call."""
        result = self._function(*args, **kwargs)
        note_call(result, self._function, args, kwargs)
        return result


def answer_questions(copied: fx.Node, original: fx.Node) -> None:
    """Let the host answer the questions of ``copied``, the node of a stage for ``original`` of the whole graph."""
    if isinstance(copied.target, OpaqueCall):
        copied.target = AnsweredCall(copied.target)
    elif copied.op in ("call_function", "call_method") and _leads_to_call(original):
        is_method = copied.op == "call_method"
        function: Any = getattr(torch.Tensor, str(copied.target)) if is_method else copied.target
        copied.target = FollowedCall(function)
        copied.op = "call_function"


def _leads_to_call(node: fx.Node) -> bool:
    pending, seen = list(node.users), set()
    while pending:
        user = pending.pop()
        if isinstance(user.target, OpaqueCall):
            return True
        if user not in seen and user.op in ("call_function", "call_method"):
            seen.add(user)
            pending += user.users
    return False
