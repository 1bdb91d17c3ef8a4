"""Resident memory of this process, as Linux counts it. It imports little, so that it can be imported first."""

from pathlib import Path


def resident_bytes() -> int:
    """Resident bytes now."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """Highest number of resident bytes since the process started, or since ``reset_peak``."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Set the peak to the resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
