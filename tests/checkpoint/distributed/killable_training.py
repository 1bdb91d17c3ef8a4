"""Training with a save after each second step, whose place is in memory that the process which kills it reads.

::

    command    fork ─▶ torchrun's agent ─▶ fork ─▶ ranks, again after each fault
               └────────── marks: place, steps, processes ◀───┘
"""

import mmap
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nxdpp import parallel_state
from nxdpp.checkpoint.distributed import directory, save
from nxdpp.doors.nxd.checkpoint import finalize_checkpoint, has_checkpoint, load_checkpoint, save_checkpoint
from tests.checkpoint.distributed.layouts import Layout, Training
from tests.support.run_program import take_signals_of_a_program
from tests.support.tensor_models import VOCABULARY, make

INTERVAL = 2
KEPT = 2
MOMENTS = ("start", "load", "step", "save", "files", "document", "rename", "latest", "removal")
_SECONDS = 900
_SLOTS = 64


class Marks:
    """Numbers in memory that processes share.

    Attributes:
        main, saving: indices in ``MOMENTS`` of the place of rank 0, and of its save, 0 outside of one.
        trained: the last step that rank 0 has trained.
        completed: the last step whose save is known to be at its end.
        kills, checked: ranks that start wait until both are equal.
        asynchronous, ends: 1 for asynchronous saves, and for an end after the next save.
        pids: processes of the ranks.
    """

    main, saving, trained, completed, kills, checked, asynchronous, ends = range(8)
    pids = 8

    def __init__(self, file: Path) -> None:
        """Numbers in ``file``; zeros if it is new."""
        with file.open("a+b") as opened:
            opened.truncate(8 * _SLOTS)
            self._numbers = memoryview(mmap.mmap(opened.fileno(), 8 * _SLOTS)).cast("q")

    def __getitem__(self, slot: int) -> int:
        return self._numbers[slot]

    def __setitem__(self, slot: int, number: int) -> None:
        self._numbers[slot] = number

    @property
    def moment(self) -> str:
        """The place of rank 0."""
        return MOMENTS[self[self.saving] or self[self.main]]


class Job(NamedTuple):
    """A training in a layout; ``saved_steps`` are those of a training that is not killed."""

    layout: Layout
    ranks: int
    path: Path
    marks: Path
    saved_steps: tuple[int, ...] = ()


def launch(job: Job, output: Path) -> int:
    """Start torchrun's agent with its ranks in a fork of this process, and return its process."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.setsid()
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        configuration = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=job.ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=1000,
            monitor_interval=0.1,
            start_method="fork",
        )
        elastic_launch(configuration, train)(job)
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def train(job: Job) -> None:
    """Resume, and train for ever, or the steps of the job."""
    marks = Marks(job.marks)
    take_signals_of_a_program()
    signal.alarm(_SECONDS)
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    while marks[Marks.kills] != marks[Marks.checked]:
        time.sleep(0.01)
    if rank == 0:
        marks[Marks.main] = marks[Marks.saving] = 0
        _mark_saves(marks)
    marks[Marks.pids + rank] = os.getpid()

    def mark(slot: int, number: int) -> None:
        if rank == 0:
            marks[slot] = number

    parallel_state.initialize_model_parallel(job.layout.tensor, job.layout.pipeline)
    training = Training(lambda: make("llama", attention_dropout=0.1), job.layout)
    training.model.train()
    torch.manual_seed(rank)
    random.seed(rank)
    numpy.random.seed(rank)
    parts = training.model, training.optimizer, training.scheduler
    mark(Marks.main, MOMENTS.index("load"))
    content = load_checkpoint(job.path, None, *parts) if has_checkpoint(job.path) else None
    step = 0 if content is None else content["step"]
    is_async, in_flight = bool(marks[Marks.asynchronous]), 0
    while True:
        step += 1
        mark(Marks.main, MOMENTS.index("step"))
        training.step(_batch(step, parallel_state.get_data_parallel_rank()))
        mark(Marks.trained, step)
        if job.saved_steps:
            if step in job.saved_steps:
                save_checkpoint(job.path, f"step_{step}", *parts, {"step": step})
            if step == max(job.saved_steps):
                return
        elif step % INTERVAL == 0:
            mark(Marks.main, MOMENTS.index("save"))
            save_checkpoint(job.path, f"step_{step}", *parts, {"step": step}, num_kept_ckpts=KEPT, async_save=is_async)
            # The save before is at its end.
            mark(Marks.completed, in_flight if is_async and in_flight else marks[Marks.completed] if is_async else step)
            in_flight = step
            if all(parallel_state.get_exchange().gather(bool(marks[Marks.ends]))):
                finalize_checkpoint()
                mark(Marks.completed, step)
                return


def _batch(step: int, replica: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(100 * step + replica))
    return {"input_ids": ids, "labels": ids}


def _mark_saves(marks: Marks) -> None:
    """Mark the part of a save that runs on this rank."""

    def marked(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            marks[Marks.saving] = number
            try:
                return function(*arguments)
            finally:
                marks[Marks.saving] = 0

        return call

    places: Iterable[tuple[Any, str]] = (
        (save, "write_checksummed"),
        (save, "write_document"),
        (directory, "put_document"),
        (directory, "write_latest"),
        (save, "prune"),
    )
    for number, (module, name) in enumerate(places, MOMENTS.index("files")):
        patch.object(module, name, marked(number, getattr(module, name))).start()
