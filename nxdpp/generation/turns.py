"""Several generations of one process in turn, so that each waits for its forward while the others compute.

::

    batch 0   send 0 ─┐                    ┌─ forward 0, token, send 0' ─┐
    batch 1           └─ send 1 ─┐         │                             └─ forward 1, token, send 1' ...
    batch 2                      └─ send 2 ┘

One of them runs at a time, in a fixed order. Each has random numbers of its own.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from nxdpp.devices.kinds import device_of


class Turns:
    """The turns of some tasks; ``pass_on`` of one lets the others run.

    Args:
        device: the device of the tasks, whose random numbers and autocast each task has as in the calling thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = threading.Condition()
        self._waiting: list[int] = []
        self._running = 0
        self._numbers = threading.local()
        self._error: BaseException | None = None

    def run(self, tasks: Sequence[Callable[[], Any]], seeds: Sequence[int]) -> list[Any]:
        """Return the results of ``tasks``, each begun with its random seed. Raises the first error of a task."""
        results: list[Any] = [None] * len(tasks)
        autocast = _autocast(self._device)
        before = random_states(self._device)

        def run(number: int) -> None:
            self._numbers.own = number
            try:
                with self._turn:
                    self._turn.wait_for(lambda: self._running == number)
                if self._error is None:
                    # A new thread has the first device for its own.
                    with device_of(self._device).as_current(), autocast():
                        torch.manual_seed(seeds[number])
                        results[number] = tasks[number]()
            except BaseException as error:
                self._error = self._error or error
            finally:
                self._hand_over(ends=True)

        self._waiting = list(range(len(tasks)))
        threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in self._waiting]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        set_random_states(self._device, before)
        if self._error is not None:
            raise self._error
        return results

    def pass_on(self) -> None:
        """Let each other task run until it passes on or ends. Raises ``RuntimeError`` if one of them failed."""
        if len(self._waiting) < 2:
            return
        states = random_states(self._device)
        self._hand_over(ends=False)
        with self._turn:
            self._turn.wait_for(lambda: self._running == self._numbers.own)
        if self._error is not None:
            raise RuntimeError("generate of another batch failed") from self._error
        set_random_states(self._device, states)

    def _hand_over(self, ends: bool) -> None:
        own = self._numbers.own
        with self._turn:
            place = self._waiting.index(own)
            following = self._waiting[(place + 1) % len(self._waiting)]
            if ends:
                self._waiting.remove(own)
            self._running = following
            self._turn.notify_all()


def _autocast(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    if not torch.is_autocast_enabled(device.type):
        return nullcontext
    dtype = torch.get_autocast_dtype(device.type)
    return lambda: torch.autocast(device.type, dtype)


def random_states(device: torch.device) -> list[torch.Tensor]:
    """The states of torch's generators of the host and of ``device``."""
    own = device_of(device).random_state()
    return [torch.get_rng_state(), *([torch.frombuffer(bytearray(own), dtype=torch.uint8)] if own else [])]


def set_random_states(device: torch.device, states: Sequence[torch.Tensor]) -> None:
    """Set the generators to the ``states`` of ``random_states``, also of another rank."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        device_of(device).set_random_state(states[1].cpu().numpy().tobytes())
