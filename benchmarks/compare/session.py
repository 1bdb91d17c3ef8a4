"""How much is measured, and on what."""

import os
import platform
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Effort(NamedTuple):
    """How many steps each contender makes, before and while it is measured."""

    warm_up: int
    steps: int


def describe_session(effort: Effort) -> dict[str, Any]:
    """What a reader must know of the machine to judge the numbers."""
    return {**describe_machine(), "warm_up_steps": effort.warm_up, "steps": effort.steps}


def describe_machine() -> dict[str, Any]:
    """Processor, load and versions."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
