"""Hooks of a parameter whose gradient is made in parts, by several stages or ranks: they wait for the whole.

In one process the hooks run in the backward of each microbatch. Here they run after the last backward of the step, for
each microbatch in turn, as autograd runs them::

    backward of a microbatch     stage 0: a_i      stage 3: b_i        kept by microbatch, and no hook runs
    after the last backward      a_i + b_i ─▶ register_hook ─▶ .grad += ─▶ register_post_accumulate_grad_hook
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nxdpp.ground.torch_names import BACKWARD_HOOKS, POST_ACCUMULATE_HOOKS
from nxdpp.ranks.faults.board import board


def count_hooks(parameter: torch.Tensor) -> int:
    """Return how many hooks the gradient of ``parameter`` has; none run for a frozen one."""
    return sum(map(len, filter(None, _hooks_of(parameter)))) if parameter.requires_grad else 0


class HeldHooks:
    """The hooks of ``parameter`` until ``run``, and its gradients meanwhile."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter
        self._hooks = _hooks_of(parameter)
        # None would not take the second kind away.
        _set_hooks(parameter, None, OrderedDict())
        self._own = parameter.register_hook(self._keep)
        # By the action of the step.
        self._gradients: list[tuple[int, torch.Tensor]] = []

    def run(
        self,
        microbatches: Sequence[int],
        earlier: torch.Tensor | None,
        whole: Callable[[torch.Tensor | None], torch.Tensor | None],
    ) -> None:
        """Put the hooks back, and add the gradients to ``earlier``, ``.grad`` from before the step.

        The hooks run for each microbatch; ``microbatches`` has the one of each action of the step. ``whole`` makes the
        gradient of a microbatch from this rank's part. Both are ``None`` where there is none.
        """
        self.put_back()
        parts: dict[int, torch.Tensor] = {}
        for action, gradient in self._gradients:
            microbatch = microbatches[action]
            parts[microbatch] = parts[microbatch] + gradient if microbatch in parts else gradient
        self._parameter.grad = earlier
        for microbatch in range(max(microbatches) + 1):
            total = whole(parts.pop(microbatch, None))
            if total is not None:
                # A hook may be another ``_keep``.
                board.action = microbatches.index(microbatch)
                torch.autograd.backward(self._parameter, total)
        board.end_actions()

    def put_back(self) -> None:
        """Give the hooks back to the parameter, with those that it has got meanwhile."""
        self._own.remove()
        new = _hooks_of(self._parameter)
        _set_hooks(self._parameter, *map(_joined, self._hooks, new))

    def _keep(self, gradient: torch.Tensor) -> None:
        self._gradients.append((board.action, gradient))


def _hooks_of(parameter: Any) -> tuple[Any, Any]:
    return BACKWARD_HOOKS.of(parameter), POST_ACCUMULATE_HOOKS.of(parameter)


def _joined(before: Any, now: Any) -> Any:
    """The hooks of both, in the dict of the ones from before, if there are any: handles remove their hooks from it."""
    if not before:
        return now or None
    before.update(now or {})
    return before


def _set_hooks(parameter: Any, of_gradient: Any, of_accumulation: Any) -> None:
    BACKWARD_HOOKS.set(parameter, of_gradient)
    POST_ACCUMULATE_HOOKS.set(parameter, of_accumulation)
