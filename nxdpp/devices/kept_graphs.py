"""Compiled graphs of an XLA device in a folder, from one start of a program to the next.

torch_xla 2.9.0 writes each graph that it compiles. It reads one by a call that PJRT's CPU device does not have.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

_logger = logging.getLogger(__name__)

# torch_xla's own name of the folder.
_VARIABLE = "XLA_PERSISTENT_CACHE_PATH"
# They write graphs and cannot load them.
LOADS_NO_GRAPHS = {"CPU"}


class KeptGraphs:
    """The folder of this process; torch_xla takes one, before its first computation.

    Args:
        device_type: gives PJRT's name of the device.
        start: lets torch_xla keep graphs in a folder.
        has_computed: tells whether a computation has run.
        failures: gives the number of graphs that could not be loaded.
    """

    def __init__(
        self,
        device_type: Callable[[], str],
        start: Callable[[str], object],
        has_computed: Callable[[], bool],
        failures: Callable[[], int],
    ) -> None:
        self._device_type = device_type
        self._start = start
        self._has_computed = has_computed
        self._failures = failures
        self._folder: Path | None = None
        self._has_warned = False

    def keep_in(self, folder: Path) -> None:
        """Keep graphs in ``folder``, which is made if absent; the same folder again changes nothing.

        Raises ``RuntimeError`` on a device that cannot load graphs, for a folder other than this process has, and
        after the first computation.
        """
        if folder == self._folder:
            return
        given = f"compilation_cache={str(folder)!r}"
        if self._device_type() in LOADS_NO_GRAPHS:
            raise RuntimeError(
                f"{given}: PJRT's {self._device_type()} device of torch_xla 2.9.0 writes compiled graphs and cannot "
                f"load them ('Deserializing serialized executable not supported'). Leave compilation_cache out."
            )
        if self._folder is not None:
            raise RuntimeError(f"{given}: this process keeps its graphs in {self._folder}. Give that folder.")
        named = os.environ.get(_VARIABLE)
        if named and Path(named).absolute() != folder:
            raise RuntimeError(f"{given}: {_VARIABLE} names {named}. Leave one of them out.")
        if self._has_computed():
            raise RuntimeError(
                f"{given}: an XLA device has computed in this process before, and torch_xla takes the folder only "
                f"before that. Call initialize_model_parallel at the start of the program."
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._start(str(folder))
        self._folder = folder

    def check(self) -> None:
        """Warn, once, of a device that cannot load a graph."""
        if self._folder is not None and not self._has_warned and self._failures():
            self._has_warned = True
            _logger.warning(
                "compilation_cache='%s': PJRT's %s device cannot load the graphs that it has written there, and each "
                "start compiles them again. Leave compilation_cache out.",
                self._folder,
                self._device_type(),
            )
