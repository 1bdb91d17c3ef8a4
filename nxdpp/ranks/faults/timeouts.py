"""The arguments ``hang_timeout`` and ``compile_timeout``."""

import numbers
import threading
from datetime import timedelta
from typing import NamedTuple

# torch counts the milliseconds in 32 bits: the longest limit is of 24 days.
_NO_LIMIT = timedelta(days=20)
# What our own report of a rank that is stuck takes, before torch ends the process without one.
_REPORT = timedelta(minutes=5)


class Timeouts(NamedTuple):
    """Limits in seconds for a rank that waits or works, or compiles, and does not move; 0 is for no limit."""

    hang: float = 0.0
    compile: float = 0.0

    def check(self) -> None:
        """Raise ``TypeError`` or ``ValueError`` for seconds that are not a time limit."""
        for name, seconds in self.named().items():
            if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
                raise TypeError(f"{name} must be a number of seconds, not {seconds!r:.80}; 0 is for no limit")
            if seconds != 0 and not 1 <= float(seconds) <= threading.TIMEOUT_MAX:
                raise ValueError(f"{name} must be at least 1 second, not {float(seconds):g}; 0 is for no limit")

    @property
    def of_operations(self) -> timedelta:
        """The limit that a process group has for each operation: longer than these, which name the rank in fault."""
        if not self.hang or not self.compile:
            return _NO_LIMIT
        return min(timedelta(seconds=float(max(self))) + _REPORT, _NO_LIMIT)

    def named(self) -> dict[str, float]:
        """The limits by the names of the arguments."""
        return {f"{name}_timeout": seconds for name, seconds in self._asdict().items()}


NO_LIMITS = Timeouts()
