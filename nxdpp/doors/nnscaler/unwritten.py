"""Tensors without values: the parameters and buffers of a module that was made by ``init_params=False``.

::

    without values ─ load of a state dict ─▶ parameters and persistent buffers have values
                   └ written by the program, and marked ─▶ non-persistent buffers have values
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nxdpp.counted import counted
from nxdpp.ground.torch_names import VERSION

_LOGGER = logging.getLogger(__name__)


class UnwrittenTensors:
    """Names of the tensors of ``part`` that have no values yet. There are none before ``leave_all``."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self._names: set[str] = set()
        self._written: dict[str, tuple[torch.Tensor, int]] = {}

    @property
    def unsaved(self) -> set[str]:
        """Names of buffers without values that a state dict leaves out."""
        return self._names - self._part.state_dict(keep_vars=True).keys() if self._names else set()

    def leave_all(self) -> None:
        """Write a value that nobody means to all tensors, where their dtype has one, and note that they have none."""
        tensors = {**self._part.state_dict(keep_vars=True), **dict(self._part.named_buffers())}
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor):
                with torch.no_grad():
                    tensor.fill_(_no_value(tensor.dtype))
                self._names.add(name)
        self.follow_move(self.unsaved)

    def check(self) -> None:
        """Raise ``RuntimeError`` while a tensor has no values."""
        if not self._names:
            return
        buffers = "Non-persistent buffers haven't been initialized. " if self.unsaved else ""
        remedy = "Load a state dict, or call broadcast_weights"
        if buffers:
            remedy = (
                "Call broadcast_weights if unit 0 has values. Else give the buffers values on each rank, and call "
                "mark_non_persistent_buffers_inited()"
            )
        raise RuntimeError(
            f"{buffers}{counted(len(self._names), 'parameter or buffer has', 'parameters or buffers have')} no values "
            f"({min(self._names)} is the first): the module was made without them. {remedy}."
        )

    def take_loaded(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Note that the tensors in ``state_dict`` that fit have values, under all their names."""
        if not self._names:
            return
        state = self._part.state_dict(keep_vars=True)
        saved = self._names & state.keys()
        loaded = {id(state[name]) for name in saved if _fits(state_dict.get(f"{prefix}{name}"), state[name])}
        self._names = {name for name in self._names if id(state.get(name)) not in loaded}
        if self.unsaved:
            _LOGGER.warning(
                "Non-persistent buffers cannot be initialized with a state dict: call broadcast_weights, or give "
                "them values and call mark_non_persistent_buffers_inited()"
            )

    def unwritten(self) -> set[str]:
        """Return the names of unsaved buffers that nothing was written to."""
        return {name for name in self.unsaved if self._is_unwritten(name)}

    def mark_unsaved(self) -> None:
        """Note that the buffers that a state dict leaves out have values.

        Raises ``RuntimeError`` for one that nothing was written to.
        """
        if unwritten := sorted(self.unwritten()):
            raise RuntimeError(
                f"{counted(len(unwritten), 'non-persistent buffer has', 'non-persistent buffers have')} no values yet "
                f"({unwritten[0]} is the first): write them before mark_non_persistent_buffers_inited()"
            )
        self._names -= self.unsaved
        self._written.clear()

    def mark_received(self) -> None:
        """Note that all tensors have the values of another rank."""
        self._names = set()
        self._written.clear()

    def follow_move(self, unwritten: set[str]) -> None:
        """Take the present tensors of the buffers ``unwritten``: a move has replaced them, and wrote no values."""
        for name in unwritten:
            buffer = self._part.get_buffer(name)
            self._written[name] = buffer, VERSION.of(buffer)

    def _is_unwritten(self, name: str) -> bool:
        """Return whether the buffer ``name`` was neither replaced nor written in place.

        A write through ``.data`` does not count the version up, and shows by its values.
        """
        tensor, (before, version) = self._part.get_buffer(name), self._written[name]
        if tensor is not before or VERSION.of(tensor) != version or tensor.numel() == 0:
            return False
        value = _no_value(tensor.dtype)
        return bool((tensor.isnan() if value != value else tensor == value).all())


def _no_value(dtype: torch.dtype) -> float:
    """The value of each element of a tensor without values: one that nobody means, if ``dtype`` has such a value."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return torch.iinfo(dtype).min if dtype.is_signed else 0


def _fits(given: Any, own: torch.Tensor) -> bool:
    """Return whether a load can copy ``given``: torch leaves tensors of different shapes out, and raises at the end."""
    return isinstance(given, torch.Tensor) and given.shape == own.shape
