"""Streamers on any rank: the driver's generation calls its own, and tells the others of each call."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer


class RelayedStreamer(BaseStreamer):
    """The streamer of the driver: ``own``, if it has one. Its calls are added to ``events`` for the other ranks."""

    def __init__(self, own: Any, events: list[Any]) -> None:
        self._own = own
        self._events = events

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt (B, T) or new tokens (B,)."""
        self._events.append(value)
        if self._own is not None:
            self._own.put(value)

    def end(self) -> None:
        """Take the end of the generation."""
        self._events.append(None)
        if self._own is not None:
            self._own.end()


def play(streamer: Any, events: Sequence[Any]) -> None:
    """Give the calls of the driver's streamer to ``streamer``, if there is one."""
    for value in events if streamer is not None else ():
        if value is None:
            streamer.end()
        else:
            streamer.put(value)
