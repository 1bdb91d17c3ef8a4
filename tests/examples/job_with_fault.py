"""The main job, of which a rank is killed once after step 3: ``job_with_fault.py MARKER ARGUMENT ...``.

The variable ``FAULT`` is ``rank`` to kill the last rank, ``agent`` to kill a rank and its agent, and ``none``.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "llama"))

import train
from report import TrainingReport

MARKER, LAST_STEP = Path(sys.argv[1]), 3


def _step_done(self: TrainingReport, step: int, *values: Any) -> None:
    _original(self, step, *values)
    fault = os.environ["FAULT"]
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if step == LAST_STEP and not MARKER.exists() and (fault == "agent" or (fault == "rank" and is_last)):
        MARKER.touch()
        if fault == "agent":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


_original = TrainingReport.step_done
TrainingReport.step_done = _step_done  # type: ignore[assignment, method-assign]

if __name__ == "__main__":
    train.main(sys.argv[2:])
