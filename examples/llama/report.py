"""Output of a run: the stage table, the progress of each step, and ``metrics.jsonl``."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numbers_of_ranks import numbers_of_all_ranks
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from nxdpp import MetricsFile, NxDPPModel, parallel_state
from nxdpp.agreement.together import from_all_ranks
from nxdpp.devices.kinds import device_of

# Number of progress lines of a run without a terminal.
PLAIN_LINES = 20

METRICS = "metrics.jsonl"
# Lines of a run while it saves.
UNFINISHED_METRICS = "metrics.unfinished.jsonl"
# Lines of an earlier run while its checkpoint is replaced.
EARLIER_METRICS = "metrics.earlier.jsonl"
# Loss, tokens per second and seconds of compilation of each step, float64 of shape (steps, 3); here of none.
NO_METRICS = torch.zeros(0, 3, dtype=torch.float64)
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


def _saved_at(folder: Path) -> int:
    files = [folder / name for name in WEIGHTS]
    return max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)


def print_stage_table(console: Console, model: NxDPPModel) -> None:
    """Print the layers, parameters and bytes of each rank; collective over all ranks."""
    parameters = [parameter for _, parameter in model.local_named_parameters()]
    own = (
        ", ".join(map(str, model.local_stages)),
        parallel_state.get_data_parallel_rank(),
        _spans(model.stage_layers),
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.nbytes for parameter in parameters),
    )
    table = Table(title="Stages")
    # A narrow terminal gets more lines, and every digit.
    for heading in ("rank", "stage", "replica"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("transformer layers", overflow="fold")
    table.add_column("parameters", justify="right", overflow="fold")
    table.add_column("bytes", justify="right", overflow="fold")
    for rank, (stage, replica, layers, count, size) in enumerate(from_all_ranks(own)):
        table.add_row(str(rank), str(stage), str(replica), layers, f"{count:,}", decimal(size))
    console.print(table)


class TrainingReport:
    """Context manager that shows each step on rank 0, and records it on all ranks.

    ``python -m nxdpp watch FOLDER`` shows the steps too. ``metrics.jsonl`` of rank 0 goes with the checkpoint: it gets
    its lines in ``saving``, with ``step``, ``loss`` and ``tokens_per_second``, and ``compile_seconds`` where a device
    compiled graphs. The one of an earlier run stays until then. ``earlier`` has the metrics of the steps before a
    resumed run. The file begins with them, even if the earlier run's file is lost.
    """

    def __init__(
        self, console: Console, folder: Path, steps: int, model: NxDPPModel, earlier: torch.Tensor = NO_METRICS
    ) -> None:
        self._console = console
        self._steps = steps
        self._shown = dist.get_rank() == 0
        # TERM=dumb has no cursor that moves.
        self._is_live = console.is_terminal and not console.is_dumb_terminal
        # In a narrow terminal the bar gives way, and no number.
        whole = Column(no_wrap=True)
        self._bar = Progress(
            TextColumn("step", table_column=whole.copy()),
            MofNCompleteColumn(table_column=whole.copy()),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TimeRemainingColumn(table_column=whole.copy()),
            TextColumn("{task.description}", table_column=whole.copy()),
            console=console,
            expand=True,
            disable=not (self._shown and self._is_live),
        )
        self._done = len(earlier)
        self._task = self._bar.add_task("", total=steps, completed=self._done)
        self._folder = folder
        self._history = torch.zeros(steps, 3, dtype=torch.float64)
        # Checkpoints of earlier versions have no seconds of compilation.
        self._history[: self._done, : earlier.shape[1]] = earlier
        # nxdpp: a line for each step of each rank, which `python -m nxdpp watch` shows.
        self._metrics = MetricsFile(folder, model, done=self._done, steps=steps)
        self._last_end = time.perf_counter()
        self._device = device_of(parallel_state.local_device())
        self._compiled = self._device.compiled()

    def __enter__(self) -> "TrainingReport":
        self._bar.start()
        # A process that is killed could not show it again.
        self._console.show_cursor()
        self._last_end = time.perf_counter()
        self._compiled = self._device.compiled()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self._bar.stop()
        self._metrics.__exit__(kind, *error)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Replace ``metrics.jsonl`` together with the checkpoint, which is saved within.

        The earlier metrics have a temporary name meanwhile. So ``metrics.jsonl`` is only ever next to its own
        checkpoint, whenever the run is killed. The next run gives the checkpoint its metrics.
        """
        metrics, earlier = self._folder / METRICS, self._folder / EARLIER_METRICS
        if self._shown:
            self._write(self._folder / UNFINISHED_METRICS)
            if metrics.exists():
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

    def metrics(self, step: int) -> torch.Tensor:
        """Loss, tokens per second and seconds of compilation up to ``step``, float64 of shape ``(step, 3)``."""
        return self._history[:step]

    def step_done(self, step: int, loss: float, tokens: int, busy_share: float, interrupted: bool = False) -> bool:
        """Report step ``step``, which had ``tokens`` tokens on all ranks; collective over all ranks.

        Returns whether any rank is ``interrupted``, the same on all.

        ``busy_share`` is the share of the step, 0 to 1, in which this rank computed. Time in which a device compiled
        graphs is shown apart, and does not count in the tokens per second. Only the rank with the least other time
        counts: it waited for the fewest others.
        """
        end, compiled = time.perf_counter(), self._device.compiled()
        seconds, graphs = compiled.seconds - self._compiled.seconds, compiled.graphs - self._compiled.graphs
        every = numbers_of_all_ranks([busy_share, end - self._last_end - seconds, seconds, graphs, float(interrupted)])
        shares = _stage_means(every[:, 0])
        tokens_per_second = tokens / every[:, 1].min().item()
        seconds, graphs = every[every[:, 2].argmax(), 2:4].tolist()
        self._last_end, self._compiled = end, compiled
        self._history[step - 1] = torch.tensor([loss, tokens_per_second, seconds], dtype=torch.float64)
        self._done = step
        self._metrics.write(loss, tokens, compile_seconds=seconds or None)
        if self._shown:
            self._show(step, loss, tokens_per_second, shares, seconds, graphs)
        return bool(every[:, 4].any())

    def add(self, **values: float) -> None:
        """Add ``values`` that belong to the last step; not collective."""
        self._metrics.add(**values)

    def _show(
        self, step: int, loss: float, tokens_per_second: float, shares: list[float], seconds: float, graphs: float
    ) -> None:
        """Show a step; rank 0 calls it."""
        line = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  busy {_range(shares)}"
        self._bar.update(self._task, completed=step, description=line)
        compiling = f"compiling {seconds:.1f} s ({graphs:.0f} graphs)  " if seconds else ""
        if compiling or (not self._is_live and step % max(1, self._steps // PLAIN_LINES) == 0):
            self._console.print(f"step {step}/{self._steps}  {compiling}{line}", highlight=False, soft_wrap=True)

    def _write(self, file: Path) -> None:
        """Replace ``file`` by the lines of all steps so far, by a rename."""
        new = file.with_name(f".{file.name}")
        with new.open("w") as lines:
            lines.writelines(
                _line(step, *values) for step, values in enumerate(self._history[: self._done].tolist(), 1)
            )
            lines.flush()
            os.fsync(lines.fileno())
        new.replace(file)


def _line(step: int, loss: float, tokens_per_second: float, compile_seconds: float) -> str:
    line = {"step": step, "loss": loss, "tokens_per_second": tokens_per_second}
    if compile_seconds:
        line["compile_seconds"] = compile_seconds
    return json.dumps(line) + "\n"


def _spans(layers: list[str]) -> str:
    """Return ``model.layers.2-3, 6`` for ``model.layers.2``, ``model.layers.3`` and ``model.layers.6``."""
    if not layers:
        return "none"
    stem = layers[0].rpartition(".")[0]
    numbers = [int(layer.rpartition(".")[2]) for layer in layers]
    firsts = [number for number in numbers if number - 1 not in numbers]
    lasts = [number for number in numbers if number + 1 not in numbers]
    runs = [f"{first}-{last}" if last > first else f"{first}" for first, last in zip(firsts, lasts, strict=True)]
    return f"{stem}.{', '.join(runs)}"


def _stage_means(busy_shares: torch.Tensor) -> list[float]:
    """Mean busy share of each stage over its replicas, in stage order, from the share of each rank."""
    # Shape (pipeline, replicas).
    by_stage = busy_shares[parallel_state.get_device_mesh().mesh.flatten(1).long()]
    means: list[float] = by_stage.mean(dim=1).tolist()
    return means


def _range(shares: list[float]) -> str:
    """The lowest and the highest of ``shares``, such as ``61-80%``: a line has room for two numbers."""
    lowest, highest = (f"{100 * share:.0f}" for share in (min(shares), max(shares)))
    return f"{lowest}%" if lowest == highest else f"{lowest}-{highest}%"
