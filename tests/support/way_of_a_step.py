"""The way of a steady training step through this project: files, functions, lines and calls, and Python's time."""

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import nxdpp
from nxdpp import NxDPPModel
from nxdpp.pipeline.runtime.engine import Engine

MICROBATCHES = 4
_PACKAGE = Path(nxdpp.__file__).resolve().parent


@dataclass
class Way:
    """The project's own code that one step executes on this rank.

    Attributes:
        calls: by file and function, how often it was entered. A generator is entered once for each value.
        lines: by file, the numbers of executed lines.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    lines: dict[str, set[int]] = field(default_factory=dict)

    @property
    def totals(self) -> dict[str, int]:
        """Files, functions, lines and calls."""
        return {
            "files": len(self.lines),
            "functions": len(self.calls),
            "lines": sum(map(len, self.lines.values())),
            "calls": self.calls.total(),
        }

    def by_file(self) -> list[tuple[str, int, int, int]]:
        """Return name, functions, lines and calls of each file, most calls first."""
        calls: Counter[str] = Counter()
        functions: Counter[str] = Counter()
        for (file, _), number in self.calls.items():
            calls[file] += number
            functions[file] += 1
        return [(file, functions[file], len(self.lines[file]), number) for file, number in calls.most_common()]


def way_of(step: Callable[[], Any]) -> Way:
    """Run ``step`` and return its way."""
    way = Way()
    names: dict[CodeType, str | None] = {}

    def note_line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            way.lines[names[frame.f_code] or ""].add(frame.f_lineno)
        return note_line

    def note_call(frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if code not in names:
            names[code] = _own_file(code.co_filename)
        name = names[code]
        if name is None:
            return None
        way.calls[name, code.co_qualname] += 1
        way.lines.setdefault(name, set())
        return note_line

    before = sys.gettrace()
    sys.settrace(note_call)
    try:
        step()
    finally:
        sys.settrace(before)
    return way


def wrapped_llama(layers: int) -> tuple[NxDPPModel, dict[str, torch.Tensor]]:
    """Return a tiny Llama, wrapped for all ranks, after its first steps, and the batch of each step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=layers
    )
    wrapped = NxDPPModel(LlamaForCausalLM(config), num_microbatches=MICROBATCHES)
    ids = torch.randint(0, 100, (2 * MICROBATCHES, 16))
    batch = {"input_ids": ids, "labels": ids}
    # The record of changes looks at all entries in looks 1, 2, 4, 8 and so on.
    for _ in range(4):
        wrapped.run_train(**batch)
    return wrapped, batch


def steady_way(layers: int) -> Way:
    """Return the way of a steady step of a Llama of ``layers`` on this rank; collective over all ranks."""
    wrapped, batch = wrapped_llama(layers)
    return way_of(lambda: wrapped.run_train(**batch))


def milliseconds_around_the_engine(layers: int, steps: int = 25) -> tuple[float, float, float]:
    """Return this thread's time before ``Engine.run``, after it, and in ``ChangeRecord.look``; the median of ``steps``.

    Collective over all ranks.
    """
    wrapped, batch = wrapped_llama(layers)
    before, after, looks = [], [], []
    entered = left = 0
    run = Engine.run

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal entered, left
        entered = time.thread_time_ns()
        try:
            return run(*args, **kwargs)
        finally:
            left = time.thread_time_ns()

    Engine.run = timed  # type: ignore[method-assign]  # for a measurement
    try:
        for _ in range(steps):
            begin = time.thread_time_ns()
            wrapped.run_train(**batch)
            end = time.thread_time_ns()
            before.append(entered - begin)
            after.append(end - left)
    finally:
        Engine.run = run  # type: ignore[method-assign]  # as above
    look = wrapped.part.changes.look
    for _ in range(steps):
        begin = time.thread_time_ns()
        look()
        looks.append(time.thread_time_ns() - begin)
    at_start, at_end, in_look = (statistics.median(times) / 1e6 for times in (before, after, looks))
    return at_start, at_end, in_look


def _own_file(name: str) -> str | None:
    if not os.path.isfile(name):
        # Generated code.
        return None
    path = Path(name).resolve()
    return path.relative_to(_PACKAGE.parent).as_posix() if _PACKAGE in path.parents else None
