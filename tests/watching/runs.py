"""Made-up metrics of runs, as ``MetricsFile`` writes them."""

import json
from pathlib import Path
from typing import Any

BEGAN = 1_000_000.0
"""Time of the start; a step takes half a second."""

STARTED = {"command": "python train.py --steps 40", "versions": {"nxdpp": "1.0", "torch": "2.13.0"}}
"""Fields of a first line that tell of the process."""


def begin(rank: int, ranks: int = 2, done: int = 0, steps: int | None = 40) -> dict[str, Any]:
    return {"time": BEGAN, "begins": True, **about(rank, ranks), "done": done, "steps": steps} | STARTED


def about(rank: int, ranks: int = 2) -> dict[str, Any]:
    place = {"rank": rank, "ranks": ranks, "stages": [rank], "replica": 0}
    return place | {"schedule": "1f1b", "host": "here", "device": "cpu"}


def step(rank: int, number: int, /, **more: Any) -> dict[str, Any]:
    own = {"loss": 4.0 / number, "tokens": 512} if rank == 0 else {}
    values = {"step": number, "seconds": 0.5, "busy": 0.75 - 0.25 * rank, "bytes": 500_000_000 + rank}
    return {"time": BEGAN + 0.5 * number, **values, **own, **more}


def actions(rank: int, number: int) -> dict[str, Any]:
    """One microbatch through two stages, with a tenth of a second for each action."""
    at = BEGAN + 0.5 * number
    places = {"F": 0, "B": 3} if rank == 0 else {"F": 1, "B": 2}
    return about(rank) | {"actions": [[f"{rank}{kind}0", at + 0.1 * place, 0.1] for kind, place in places.items()]}


def lines(folder: Path, rank: int, *written: dict[str, Any]) -> Path:
    """Append lines to the file of ``rank``."""
    path = folder / "metrics" / f"rank{rank:04}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in written)
    return path


def whole_run(folder: Path, steps: int = 20, **last: Any) -> Path:
    """Write a run of two ranks that goes on; ``last`` are values of the last step of rank 0."""
    for rank in range(2):
        told = [
            step(rank, number, **(actions(rank, number) if number % 10 == 0 else {})) for number in range(1, steps + 1)
        ]
        told[-1] |= last if rank == 0 else {}
        lines(folder, rank, begin(rank), *told)
    return folder
