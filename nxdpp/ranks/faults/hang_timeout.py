"""The argument ``hang_timeout``."""

import numbers
import threading


def check_hang_timeout(seconds: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` for seconds that are not a time limit."""
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
        raise TypeError(f"hang_timeout must be a number of seconds, not {seconds!r:.80}; 0 is for no limit")
    if seconds != 0 and not 1 <= float(seconds) <= threading.TIMEOUT_MAX:
        raise ValueError(f"hang_timeout must be at least 1 second, not {float(seconds):g}; 0 is for no limit")
