"""Saves whose files a thread writes while the training continues.

::

    main thread    plan, copy to host memory ─▶ next steps ...                       error, if there was one
    thread                                   └▶ files, document, latest ─▶ done ────────┘

The ranks' threads exchange by a connection of their own. One save is in flight at a time.
"""

import itertools
import threading
from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from nxdpp.checkpoint.distributed.captured import Captured
from nxdpp.checkpoint.distributed.ranks import Exchange
from nxdpp.checkpoint.distributed.save import Save
from nxdpp.ranks.faults import background_errors

_numbers = itertools.count()


class BackgroundSaves:
    """The background saves of a process, which its main thread starts."""

    def __init__(self) -> None:
        self._stager: DefaultStager | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_in_flight(self) -> bool:
        """A save has not ended on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, save: Save, state: Captured) -> None:
        """Plan ``save``, copy its values, and write them in a thread; collective over all ranks.

        Waits for the previous save and raises its error. Also raises as ``Save.plan`` does.
        """
        self.wait()
        tensors = save.plan(state)
        staged = save.exchange.together(lambda: self._copied(tensors))
        save.exchange = Exchange(f"checkpoint_{next(_numbers)}")
        self._thread = threading.Thread(target=_write, args=(save, staged), name="nxdpp checkpoint")
        self._thread.start()

    def _copied(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy ``tensors`` to host memory, which the next copy reuses."""
        if self._stager is None:
            self._stager = _new_stager(tensors)
        try:
            staged = self._stager.stage(tensors)
        except AssertionError:
            # A tensor was resized since the last copy: that memory is too small or too large.
            self.close()
            self._stager = _new_stager(tensors)
            staged = self._stager.stage(tensors)
        assert isinstance(staged, dict)
        return staged

    def wait(self) -> None:
        """Wait for the save in flight, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        background_errors.raise_first()

    def close(self) -> None:
        """Free the memory of the copies."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None


def _new_stager(tensors: Mapping[str, torch.Tensor]) -> DefaultStager:
    # Staging in another thread would copy values that the next step changes.
    is_cuda = any(tensor.is_cuda for tensor in tensors.values())
    return DefaultStager(StagingOptions(is_cuda, False, False, is_cuda))


def _write(save: Save, staged: dict[str, torch.Tensor]) -> None:
    try:
        save.write(staged)
    except Exception as error:
        # An error of one rank is raised in the threads of all ranks.
        background_errors.keep(error, save.exchange.all_of)
