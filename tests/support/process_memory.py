"""Resident memory of this process, as Linux counts it. Imports nothing, so that it can come first."""

from pathlib import Path


def resident_bytes() -> int:
    """Bytes that are resident now."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most bytes that were resident since the process began, or since ``reset_peak``."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Have the peak count from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
