"""Drawn scripts run over ranks, many in one start of the processes."""

import re
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from nxdpp import parallel_state
from nxdpp.ranks.faults import failure_watch
from tests.support.run_ranks import run_ranks
from tools.loops import actions
from tools.loops.draw import Script
from tools.loops.models import make
from tools.loops.ranks import RankTraining, initialize
from tools.loops.training import Training, WholeTraining

SCRIPTS = 40
"""Scripts of one start of the ranks."""

SECONDS = 1.5
"""Time that a rank waits for the others at the end of a script, before it ends its start."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a script.

    Attributes:
        kind: "equal", "different", "refused", "invalid" if one process raises too, or "ended" if no rank has raised.
        reason: the difference or the error.
    """

    kind: str
    reason: str = ""

    @property
    def short(self) -> str:
        """The beginning of the reason without numbers and names of tensors, and its place."""
        text, _, place = self.reason.rpartition(" [")
        text = re.sub(r"\b(layers|embed|head|norm|side|up|down|base)(\.\w+)*\b", "NAME", text.split("\n")[0])
        return f"{re.sub(r'[0-9]+', 'N', text)[:110]} [{place}"


def outcomes(scripts: Sequence[Script], jobs: int = 1) -> Iterator[tuple[Script, Outcome]]:
    """Run the scripts; yield each with its outcome, in the order of the ends of their starts."""
    sized = [[script for script in scripts if script.world_size == size] for size in (2, 4)]
    starts = [group[first : first + SCRIPTS] for group in sized for first in range(0, len(group), SCRIPTS)]
    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(_of_start, starts):
            yield from found


def _of_start(scripts: list[Script]) -> list[tuple[Script, Outcome]]:
    """Run the scripts in one start of the ranks, and in a further one after each that ends the ranks."""
    found: list[tuple[Script, Outcome]] = []
    while len(found) < len(scripts):
        left = scripts[len(found) :]
        with tempfile.TemporaryDirectory(prefix="nxdpp-loops-") as folder:
            error = ""
            try:
                run_ranks(left[0].world_size, run_scripts, left, Path(folder), timeout=30.0 + 3 * len(left))
            except AssertionError as raised:
                error = str(raised)
            before = len(found)
            for place, script in enumerate(left):
                of_ranks = written(Path(folder), place, script.world_size)
                if of_ranks:
                    found.append((script, _together(of_ranks, script.world_size)))
                elif error:
                    found.append((script, Outcome("ended", error)))
                # The start ended with the first script that not all ranks have ended.
                if len(of_ranks) < script.world_size:
                    break
            assert len(found) > before
    return found


def _together(of_ranks: list[Outcome], world_size: int) -> Outcome:
    """The outcome of a script from the outcomes of its ranks."""
    order = ("different", "invalid", "refused", "equal")
    first = min(of_ranks, key=lambda outcome: order.index(outcome.kind))
    if first.kind == "equal" and len(of_ranks) < world_size:
        return Outcome("ended", "a rank ended without an error, after the others had ended the script")
    if first.kind == "different" and any(outcome.kind == "refused" for outcome in of_ranks):
        return next(outcome for outcome in of_ranks if outcome.kind == "refused")
    return first


def written(folder: Path, place: int, world_size: int) -> list[Outcome]:
    """The outcomes that ranks have written for the script at ``place``."""
    texts = [file.read_text() for file in (folder / f"{place}.{rank}" for rank in range(world_size)) if file.exists()]
    return [Outcome(*text.split("\n", 1)) for text in texts]


def run_scripts(rank: int, scripts: list[Script], folder: Path) -> None:
    """Run scripts on a rank, and write a file for each; raise if the ranks are not in step after one."""
    # One world for all layouts.
    dist.init_process_group()
    for place, script in enumerate(scripts):
        failed: Exception | None = None
        try:
            outcome = _run_script(script, folder / f"script {place}")
        except Exception as error:
            outcome, failed = Outcome("refused", _reason(error)), error
        unfinished = folder / f"part of {rank}"
        unfinished.write_text(f"{outcome.kind}\n{outcome.reason}")
        unfinished.rename(folder / f"{place}.{rank}")
        if failed is not None and not _all_refused(folder, place, script.world_size):
            raise failed
        parallel_state.destroy_model_parallel()


def _run_script(script: Script, folder: Path) -> Outcome:
    """Run a script in one process and on this rank."""
    alone = (WholeTraining if script.has_equal_rows else Training)(script, make(script.kind))
    try:
        act(alone)
    except Exception as error:
        return Outcome("invalid", _reason(error))
    is_divided = initialize(script)
    training = RankTraining(script, make(script.kind, is_divided), alone.events, folder)
    act(training)
    return Outcome("different", training.found) if training.found else Outcome("equal")


def act(training: Training) -> None:
    for place, action in enumerate(training.script.actions):
        training.doing = f"{place}: {action}"
        getattr(actions, action.name)(training, **action.arguments)


def _all_refused(folder: Path, place: int, world_size: int) -> bool:
    """Wait for the other ranks; return whether they have all refused the script before anything was sent."""
    deadline = time.monotonic() + SECONDS
    while failure_watch._failure is None and time.monotonic() < deadline:
        of_ranks = written(folder, place, world_size)
        if len(of_ranks) == world_size:
            return all(outcome.kind == "refused" for outcome in of_ranks)
        time.sleep(0.01)
    return False


def _reason(error: Exception) -> str:
    """The error with its last place in nxdpp or in the script."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    return f"{type(error).__name__}: {error} [{Path(frames[-1].filename).name}:{frames[-1].lineno}]"
