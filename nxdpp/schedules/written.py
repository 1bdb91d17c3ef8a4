"""Schedules written by a user: the actions of each rank as lists of text or as a CSV file.

A CSV file has one row per rank and one action per cell, ``0F0`` (see ``parse_action``). Empty cells are ignored::

    0F0,0F1,,,0B0,0B1
    ,1F0,1B0,1F1,1B1,
"""

import csv
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from nxdpp.schedules.actions import Action, Schedule, parse_action
from nxdpp.schedules.check import check


def parse_schedule(ranks: Sequence[Sequence[str]]) -> Schedule:
    """Parse and check the schedule of the action texts of each rank.

    Raises ``ValueError`` for a text that is no action, with its rank and place, and ``ScheduleError`` for a schedule
    that cannot run.
    """
    schedule = [_parse_rank(rank, texts) for rank, texts in enumerate(ranks)]
    check(schedule)
    return schedule


def read_schedule(path: Path) -> Schedule:
    """Read and check a CSV file; raises as ``parse_schedule``, and ``ValueError`` for a file that cannot be read."""
    try:
        if path.is_fifo() or path.is_char_device():
            raise OSError("it is a pipe or a device, which may never end. Write it into a file first.")
        rows = list(csv.reader(StringIO(path.read_text(encoding="utf-8"))))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read as a CSV file of actions: {error}") from None
    # Empty lines at the end are not ranks.
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    try:
        return parse_schedule([[cell for cell in row if cell.strip()] for row in rows])
    except ValueError as error:
        raise type(error)(f"{path}: {error}") from None


def _parse_rank(rank: int, texts: Sequence[str]) -> list[Action]:
    actions = []
    for at, text in enumerate(texts):
        try:
            actions.append(parse_action(text))
        except ValueError as error:
            raise ValueError(f"rank {rank}, action {at}: {error}") from None
    return actions
