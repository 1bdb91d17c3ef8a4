"""Output of a run: the stage table, the progress of each step, and ``metrics.jsonl``."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from nxdpp import NxDPPModel, parallel_state
from nxdpp.parallel_layers.all_ranks import from_all_ranks

# Number of progress lines of a run without a terminal.
PLAIN_LINES = 20

METRICS = "metrics.jsonl"
# Lines of a run that has not saved.
UNFINISHED_METRICS = "metrics.unfinished.jsonl"
# Lines of an earlier run while its checkpoint is replaced.
EARLIER_METRICS = "metrics.earlier.jsonl"
# Each of them shows that a run has saved.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def holds_a_run(folder: Path) -> bool:
    """Return whether ``folder`` has a checkpoint or the metrics of an earlier run."""
    return any((folder / name).exists() for name in (METRICS, *WEIGHTS))


def settle_metrics(folder: Path) -> None:
    """Give the checkpoint in ``folder`` its metrics, where a run was killed while it saved; rank 0 calls it."""
    unfinished, earlier = folder / UNFINISHED_METRICS, folder / EARLIER_METRICS
    if (folder / METRICS).exists():
        earlier.unlink(missing_ok=True)
    elif unfinished.exists() and _saved_at(folder) >= unfinished.stat().st_mtime_ns:
        # The run saved after its last step.
        unfinished.replace(folder / METRICS)
        earlier.unlink(missing_ok=True)
    elif earlier.exists():
        earlier.replace(folder / METRICS)


def keep_metrics(folder: Path, sources: Sequence[Path], step: int) -> bool:
    """Begin the metrics of this run with the lines up to ``step``, by a rename; rank 0 calls it.

    They come from the first of ``sources`` that has them all. Returns whether one has.
    """
    kept: list[str] = []
    for source in sources:
        lines = _lines(source, step) if source.exists() else []
        if len(lines) > len(kept):
            kept = lines
    new = folder / f".{UNFINISHED_METRICS}"
    with new.open("w") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / UNFINISHED_METRICS)
    return len(kept) == step


def _lines(source: Path, step: int) -> list[str]:
    """Whole lines of the steps up to ``step``, one for each."""
    found: dict[int, str] = {}
    for line in source.read_text().splitlines():
        try:
            found.setdefault(json.loads(line)["step"], f"{line}\n")
        except ValueError:
            # A killed run had begun this line.
            continue
    return [found[number] for number in sorted(found) if number <= step]


def _saved_at(folder: Path) -> int:
    files = [folder / name for name in WEIGHTS]
    return max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)


def print_stage_table(console: Console, model: NxDPPModel) -> None:
    """Print the layers, parameters and bytes of each rank; collective over all ranks."""
    parameters = [parameter for _, parameter in model.local_named_parameters()]
    own = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        _span(model.stage_layers),
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.nbytes for parameter in parameters),
    )
    table = Table(title="Stages")
    for heading in ("rank", "stage", "replica"):
        table.add_column(heading, justify="right")
    table.add_column("transformer layers")
    table.add_column("parameters", justify="right")
    table.add_column("bytes", justify="right")
    for rank, (stage, replica, layers, count, size) in enumerate(from_all_ranks(own)):
        table.add_row(str(rank), str(stage), str(replica), layers, f"{count:,}", decimal(size))
    console.print(table)


class TrainingReport:
    """Context manager that shows and records each step on rank 0.

    A file in ``folder`` gets a line for each step with ``step``, ``loss`` and ``tokens_per_second``. It becomes
    ``metrics.jsonl`` in ``saving``. The one of an earlier run stays until then. After ``done`` steps of a resumed run
    the file goes on.
    """

    def __init__(self, console: Console, folder: Path, steps: int, done: int = 0) -> None:
        self._console = console
        self._steps = steps
        self._shown = dist.get_rank() == 0
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not (self._shown and console.is_terminal),
        )
        self._task = self._bar.add_task("", total=steps, completed=done)
        self._folder = folder
        mode = "a" if done else "w"
        self._metrics = (folder / UNFINISHED_METRICS).open(mode, buffering=1) if self._shown else None
        self._last_end = time.perf_counter()

    def __enter__(self) -> "TrainingReport":
        self._bar.start()
        self._last_end = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._metrics:
            self._metrics.close()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Replace ``metrics.jsonl`` together with the checkpoint, which is saved within.

        The earlier metrics have another name meanwhile. So ``metrics.jsonl`` is never beside another checkpoint than
        its own, whenever the run is killed. The next run gives the checkpoint its metrics.
        """
        metrics, earlier = self._folder / METRICS, self._folder / EARLIER_METRICS
        if self._shown and metrics.exists():
            metrics.replace(earlier)
        try:
            yield
        except BaseException:
            if self._shown and earlier.exists():
                earlier.replace(metrics)
            raise
        if self._shown:
            (self._folder / UNFINISHED_METRICS).replace(metrics)
            earlier.unlink(missing_ok=True)

    def flush(self) -> None:
        """Write the lines to the disk."""
        if self._metrics:
            os.fsync(self._metrics.fileno())

    def step_done(self, step: int, loss: float, tokens: int, busy_share: float) -> None:
        """Report step ``step``, which had ``tokens`` tokens on all ranks; collective over all ranks.

        ``busy_share`` is the share of the step, 0 to 1, in which this rank computed.
        """
        shares = _stage_means(busy_share)
        end = time.perf_counter()
        tokens_per_second = tokens / (end - self._last_end)
        self._last_end = end
        if self._metrics is None:
            return
        record = {"step": step, "loss": loss, "tokens_per_second": tokens_per_second}
        self._metrics.write(json.dumps(record) + "\n")
        busy = " ".join(f"{share:.0%}" for share in shares)
        line = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  busy {busy}"
        self._bar.update(self._task, completed=step, description=line)
        if not self._console.is_terminal and step % max(1, self._steps // PLAIN_LINES) == 0:
            self._console.print(f"step {step}/{self._steps}  {line}", highlight=False, soft_wrap=True)


def _span(layers: list[str]) -> str:
    """Return ``model.layers.2-3`` for ``model.layers.2`` and ``model.layers.3``."""
    if not layers:
        return "none"
    return layers[0] if len(layers) == 1 else f"{layers[0]}-{layers[-1].rpartition('.')[2]}"


def _stage_means(busy_share: float) -> list[float]:
    """Mean busy share of each stage over its replicas, in stage order; collective over all ranks."""
    own = torch.tensor(busy_share, device=parallel_state.local_device())
    shares = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, own)
    # Shape (pipeline, replicas).
    by_stage = torch.stack(shares)[parallel_state.get_device_mesh().mesh.flatten(1).long()]
    means: list[float] = by_stage.mean(dim=1).tolist()
    return means
