"""Writer of the metrics of a run: a file for each rank with a line for each step.

::

    out/metrics/rank0000.jsonl     {"time": ..., "begins": true, "rank": 0, "ranks": 4, "stages": [0], ...}
                                   {"time": ..., "step": 1, "seconds": 0.34, "loss": 4.85, "tokens": 4096, ...}
    out/metrics/rank0003.jsonl     {"time": ..., "step": 1, ...}
                                   {"time": ..., "fault": "stops because rank 0 died without an error: ..."}

A line is one JSON object, and is appended in one call. So a reader sees whole lines, and a killed process loses none.
"""

import json
import logging
import math
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
import transformers

from nxdpp.counted import counted
from nxdpp.devices.memory import peak_bytes
from nxdpp.pipeline.model import NxDPPModel
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults.ending_process import fault_listeners, sentence_of
from nxdpp.version import __version__

_LOGGER = logging.getLogger("nxdpp")
# Names that MetricsFile itself gives to a line: the start and its rank, and a step. A program has to choose others.
_OF_RANKS = (
    *("begins", "ends", "done", "steps", "rank", "ranks", "stages", "replica", "tensor_rank", "schedule", "host"),
    *("device", "command", "versions"),
)
OWN_NAMES = frozenset(("time", "step", "seconds", "busy", "bytes", "actions", "fault", "routing", *_OF_RANKS))


class MetricsFile:
    """Metrics of this rank's steps, which ``python -m nxdpp watch FOLDER`` shows; every rank makes one.

    ::

        with nxdpp.MetricsFile("out", model, steps=300) as metrics:
            for batch in batches:
                loss = model.run_train(**batch)
                optimizer.step()
                optimizer.zero_grad()
                metrics.write(loss=loss, tokens=batch["input_ids"].numel())

    The first line has the command of this process and the versions of nxdpp, torch, transformers and Python. No method
    is collective. A CUDA device is waited for at the end of each step. The last line says how the ``with``
    block was left, or which fault ended the process. A new ``MetricsFile`` of the same folder closes an earlier one.

    Args:
        folder: of the run. Rank 3 appends to ``FOLDER/metrics/rank0003.jsonl``. Hosts share the folder. Otherwise
            copy the files of all hosts into one folder for ``watch``.
        model: the ``NxDPPModel`` of the steps.
        done: the number of steps before the first one here, as after a resumed checkpoint. Later lines of a step
            replace earlier ones, and a start at an earlier step replaces all that followed it.
        steps: the number of steps of the whole run, if it is known.
        actions_every: each time that the steps are a multiple of it, the line has the times of the step's actions,
            0 for never.

    Raises ``TypeError`` for a ``model`` that is no ``NxDPPModel``, ``ValueError`` for negative numbers and for
    ``steps`` that are no whole number, ``OSError`` for a folder that cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: NxDPPModel[bool, bool],
        *,
        done: int = 0,
        steps: int | None = None,
        actions_every: int = 10,
    ) -> None:
        if not isinstance(model, NxDPPModel):
            raise TypeError(f"the model must be an NxDPPModel, not {type(model).__name__}: wrap it first.")
        if done < 0 or actions_every < 0:
            raise ValueError(f"done={done} and actions_every={actions_every} must not be negative.")
        if steps is not None and not (isinstance(steps, Integral) and steps >= 0):
            raise ValueError(f"steps={steps} must be a whole number that is not negative, or None if it is unknown.")
        self._model = model
        self._rank = dist.get_rank()
        self._step = done
        self._actions_every = actions_every
        self._device = parallel_state.local_device()
        self._ended_at: float | None = None
        self.path = Path(folder) / "metrics" / f"rank{self._rank:04}.jsonl"
        self._is_left = False
        for listener in list(fault_listeners):
            earlier = getattr(listener, "__self__", None)
            if isinstance(earlier, MetricsFile) and (earlier._is_left or earlier.path == self.path):
                earlier._release()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._is_torn = self._has_warned = False
        self._closed_size = 0
        self._file: int | None = None
        self._open()
        self._about: dict[str, Any] = {
            "rank": self._rank,
            "ranks": dist.get_world_size(),
            "stages": model.local_stages,
            "replica": parallel_state.get_replica_rank(),
            "tensor_rank": parallel_state.get_tensor_model_parallel_rank(),
            "schedule": model.schedule_name,
            "host": socket.gethostname(),
            "device": self._device.type,
        }
        begins = {"begins": True, **self._about, "done": done, "steps": None if steps is None else int(steps)}
        self._append(begins | {"command": shlex.join(sys.orig_argv), "versions": _versions()})

    def write(self, loss: Any = None, tokens: int | None = None, **more: Any) -> None:
        """Append the line of a step that has ended; once a step, on every rank.

        It has the number of the step, the seconds since the last ``write`` or ``add``, the busy share and the most
        bytes of memory so far. An evaluation or a save in between counts, unless an ``add`` follows it.

        Args:
            loss: a number or a tensor of one element, which waits for its device; ``None`` on ranks that have none.
                It is left out on ranks that are neither rank 0 nor of the last stage.
            tokens: of the step in the whole job.
            more: numbers, tensors of one element or of one dimension, and lists of numbers, by names of your own.
                ``experts=`` has the number of tokens that each expert got on this rank. ``watch`` adds them up over
                the ranks whose tensor rank is 0: the others have the same tokens. Of experts over ranks it is written
                without the argument, with ``routing`` (``model.last_expert_balance``).

        Numbers that are not finite are written as the texts ``"nan"``, ``"inf"`` and ``"-inf"``.

        Raises ``TypeError`` for other values, ``ValueError`` for a list of losses and for a name that a line has
        already. A file that cannot be written is a warning.
        """
        has_loss = self._rank == 0 or self._model.holds_last_stage
        told = _plain_values({"loss": loss if has_loss else None, "tokens": tokens, **more})
        if isinstance(told.get("loss"), list):
            count = len(told["loss"])
            raise ValueError(
                f"loss= has {counted(count, 'number')}, as with return_mb_loss=True: give their mean, one number."
            )
        now, before = time.perf_counter(), self._ended_at
        self._ended_at = now
        self._step += 1
        line = {
            "step": self._step,
            "seconds": self._model.last_step_seconds if before is None else now - before,
            **self._model.last_expert_balance,
            **told,
            "busy": round(self._model.last_busy_share, 4),
            "bytes": peak_bytes(self._device),
        }
        if self._actions_every and self._step % self._actions_every == 0:
            line |= self._about | {"actions": self._actions()}
        self._append(line)

    def add(self, **more: Any) -> None:
        """Append values of the last step that become known after its line, as the loss of an evaluation.

        The time that is spent until then does not count as seconds of the next step. After ``close`` too, unless a
        later ``MetricsFile`` has written to the file. Raises as ``write`` does.
        """
        line = {"step": self._step, **_plain_values(more)}
        if is_late := self._file is None and self.is_last:
            self._open()
        self._append(line)
        if is_late:
            self.close()
        elif self._ended_at is not None:
            self._ended_at = time.perf_counter()

    def close(self) -> None:
        """Append a last line, and close the file; again without effect."""
        if self._file is not None and not self._is_left:
            self._append({"ends": True})
            self._closed_size = os.fstat(self._file).st_size
        self._release()

    @property
    def is_last(self) -> bool:
        """``True`` unless a later ``MetricsFile`` has written to the file since ``close``."""
        return self._file is not None or (self.path.exists() and self.path.stat().st_size == self._closed_size)

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._file).st_size
        # A killed process may have left a part of a line.
        self._is_torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        fault_listeners.append(self._write_fault)

    def _release(self) -> None:
        if self._file is not None:
            fault_listeners.remove(self._write_fault)
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._file is not None:
            self._append({"ends": sentence_of(error)})
            # If the error ends the process, the failure watch adds the fault, which may have begun on a different rank.
            self._is_left = True
        else:
            self.close()

    def _actions(self) -> list[list[Any]]:
        """Return text, start in seconds since 1970, and seconds of each compute action of the last step."""
        ahead = time.time_ns() - time.perf_counter_ns()
        times = self._model.last_action_times
        return [[text, round(1e-9 * (start + ahead), 6), round(1e-9 * (end - start), 6)] for text, start, end in times]

    def _write_fault(self, sentence: str) -> None:
        """Append the fault that ends this process; any thread may call it."""
        self._append({"fault": sentence})

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            raise ValueError(f"{self.path} is closed: write before close(), or make a new MetricsFile.")
        text = json.dumps({"time": round(time.time(), 3), **line}, separators=(",", ":"), allow_nan=False)
        data = f"{chr(10) if self._is_torn else ''}{text}\n".encode()
        try:
            self._is_torn = os.write(self._file, data) < len(data)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                _LOGGER.warning(f"{self.path} lacks lines: {error.strerror}. The training continues.")


def _versions() -> dict[str, str]:
    return {
        "nxdpp": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are there, for JSON."""
    taken = [name for name in values if name in OWN_NAMES]
    if taken:
        raise ValueError(f"{taken[0]}=: a line has {taken[0]} of its own. Choose another name.")
    return {name: _plain(name, value) for name, value in values.items() if value is not None}


def _plain(name: str, value: Any) -> Any:
    """Return a value for JSON: numbers that are not finite as texts, such as ``"nan"``."""
    if isinstance(value, torch.Tensor) and (value.dim() < 2 or value.numel() == 1):
        value = value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(name, each) for each in value]
    if not isinstance(value, Real):
        raise TypeError(f"{name}={value!r:.60} must be a number, a list of numbers or a tensor of one dimension.")
    number = int(value) if isinstance(value, Integral) else float(value)
    return number if math.isfinite(number) else str(number)
