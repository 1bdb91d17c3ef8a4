"""Code of the user, as opposed to installed packages that it calls, such as a logger."""

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from torch import nn

from nxdpp.tracing.code_names import is_framework

_INSTALLED = ("site-packages", "dist-packages")


class OwnCode:
    """Code of the packages in which the classes of the modules ``spine`` are, and of files that are not installed.

    It is the thread's that made this object: a data loader may run the same functions.
    """

    def __init__(self, spine: Iterable[nn.Module]) -> None:
        self._thread = threading.get_ident()
        classes = {cls.__module__ for module in spine for cls in type(module).__mro__}
        self._packages = {name.partition(".")[0] for name in classes if not is_framework(name)}

    def runs(self, frame: FrameType | None) -> bool:
        """Return whether ``frame`` runs such code."""
        if frame is None or threading.get_ident() != self._thread:
            return False
        name = str(frame.f_globals.get("__name__"))
        if is_framework(name):
            return False
        return name.partition(".")[0] in self._packages or not any(p in frame.f_code.co_filename for p in _INSTALLED)


def caller_outside(packages: Iterable[str]) -> FrameType | None:
    """The innermost frame of code outside ``packages`` and this package."""
    inside = {*packages, "nxdpp"}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in inside:
        frame = frame.f_back
    return frame


_active: list[OwnCode] = []


@contextmanager
def watched_code(own: OwnCode) -> Iterator[None]:
    """Make ``own`` the code that ``is_watched`` tells."""
    _active.append(own)
    try:
        yield
    finally:
        _active.pop()


def is_watched(frame: FrameType | None) -> bool:
    """Return whether a trace is running, and ``frame`` runs code of its user."""
    return bool(_active) and _active[-1].runs(frame)
