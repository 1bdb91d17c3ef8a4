"""Replay of the logs of all ranks: could the operations of communicators wait in a circle with one hardware queue?

A run that ended well may have been lucky: each communicator had a queue of its own. With one queue a rank, as with
``CUDA_DEVICE_MAX_CONNECTIONS=1``, an operation blocks all that was launched behind it. Two actors a rank are replayed:
the host, which launches, connects communicators and waits, and the queue, which runs what was launched in its order.

    python -m tests.support.fake_device.deadlock FOLDER
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]


@dataclass(frozen=True)
class Stuck:
    """The operation that a rank stands before at the end of a replay.

    Attributes:
        rank: the rank.
        operation: words for the operation of its queue, or for what its host does.
        waits_for: ranks that have not come.
    """

    rank: int
    operation: str
    waits_for: tuple[int, ...]


def read(folder: Path) -> dict[int, list[Line]]:
    """Return the logged lines of each rank."""
    logs = {}
    for file in sorted(folder.glob("rank*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            if "communicator" in line:
                # Groups that were destroyed leave their numbers to others.
                line["communicator"] += f" of {line['ranks']}"
        logs[int(file.stem.removeprefix("rank"))] = lines
    return logs


def replay(logs: dict[int, list[Line]]) -> list[Stuck]:
    """Return what each rank stands before where the replay ends early; nothing if all operations run."""
    hosts = {rank: _numbered(lines, rank) for rank, lines in logs.items()}
    queues: dict[int, list[Line]] = {rank: [] for rank in logs}
    at = dict.fromkeys(logs, 0)
    done = dict.fromkeys(logs, 0)
    moves = True
    while moves:
        moves = False
        for rank in logs:
            while at[rank] < len(hosts[rank]):
                line = hosts[rank][at[rank]]
                if line["kind"] == "operation":
                    queues[rank].append(line)
                elif line["kind"] == "wait":
                    if done[rank] < len(queues[rank]):
                        break
                elif not _all_connect(line, hosts, at):
                    break
                at[rank] += 1
                moves = True
        for rank in logs:
            if done[rank] < len(queues[rank]):
                members = _together(rank, queues, done)
                if members is not None:
                    for member in members:
                        done[member] += 1
                    moves = True
    return [
        *(_stuck(rank, queues, done) for rank in logs if done[rank] < len(queues[rank])),
        *(
            Stuck(rank, f"the host, in {_words(hosts[rank][at[rank]])}", tuple(hosts[rank][at[rank]].get("ranks", ())))
            for rank in logs
            if at[rank] < len(hosts[rank]) and done[rank] == len(queues[rank])
        ),
    ]


def _numbered(lines: list[Line], rank: int) -> list[Line]:
    """Number the messages of each pair and way within a communicator; they match in this order."""
    counts: Counter[Any] = Counter()
    return [_named(line, rank, counts) if line["kind"] == "operation" else line for line in lines]


def _named(line: Line, rank: int, counts: Counter[Any]) -> Line:
    names = []
    for part in line["parts"]:
        if part["kind"] in ("send", "recv"):
            pair: tuple[Any, Any] = (rank, part["peer"]) if part["kind"] == "send" else (part["peer"], rank)
        else:
            pair = ("all", "all")
        key = (line["communicator"], *pair)
        names.append((*key, counts[part["kind"], key]))
        counts[part["kind"], key] += 1
    return {**line, "names": names}


def _all_connect(line: Line, hosts: dict[int, list[Line]], at: dict[int, int]) -> bool:
    """Return whether the hosts of all members have come to connect this communicator, or have done it."""
    for member in line["ranks"]:
        lines = hosts.get(member, [])
        number = next((i for i, each in enumerate(lines) if _is_connect(each, line)), None)
        if number is None or at[member] < number:
            return False
    return True


def _is_connect(each: Line, line: Line) -> bool:
    return bool(each["kind"] == "connect" and each["communicator"] == line["communicator"])


def _partners(rank: int, line: Line) -> set[int]:
    partners = {part["peer"] for part in line["parts"] if part["kind"] in ("send", "recv")}
    if any(part["kind"] not in ("send", "recv") for part in line["parts"]):
        partners |= set(line["ranks"])
    return partners - {rank}


def _together(rank: int, queues: dict[int, list[Line]], done: dict[int, int]) -> set[int] | None:
    """Return the ranks whose present operations run together with that of ``rank``, or ``None`` if one has not come."""
    members, new = {rank}, [rank]
    while new:
        member = new.pop()
        line = queues[member][done[member]]
        for partner in _partners(member, line):
            if done.get(partner, 0) >= len(queues.get(partner, [])):
                return None
            other = queues[partner][done[partner]]
            if other["communicator"] != line["communicator"] or not set(line["names"]) & set(other["names"]):
                return None
            if partner not in members:
                members.add(partner)
                new.append(partner)
    return members


def _stuck(rank: int, queues: dict[int, list[Line]], done: dict[int, int]) -> Stuck:
    line = queues[rank][done[rank]]
    missing = []
    for partner in sorted(_partners(rank, line)):
        present = queues[partner][done[partner]] if done[partner] < len(queues[partner]) else None
        if present is None or not set(line["names"]) & set(present["names"]):
            missing.append(partner)
    return Stuck(rank, _words(line), tuple(missing))


def _words(line: Line) -> str:
    if line["kind"] == "connect":
        return f"the first use of communicator {line['communicator']}"
    if line["kind"] == "wait":
        return "a wait for the device"
    parts = [
        f"{part['kind']} {'to' if part['kind'] == 'send' else 'from'} {part['peer']}"
        if part["kind"] in ("send", "recv")
        else part["kind"]
        for part in line["parts"]
    ]
    return f"{' + '.join(parts)} (number {line['number']} of communicator {line['communicator']})"


def check(folder: Path) -> None:
    """Raise ``AssertionError`` with what waits in a circle."""
    stuck = replay(read(folder))
    lines = [f"rank {each.rank}: {each.operation} waits for ranks {list(each.waits_for)}" for each in stuck]
    assert not stuck, "\n".join(["with one hardware queue a rank, operations wait for each other:", *lines])


def main(folder: str) -> int:
    """Print what waits in a circle; return 1 if something does."""
    stuck = replay(read(Path(folder)))
    for each in stuck:
        print(f"rank {each.rank}: {each.operation} waits for ranks {list(each.waits_for)}")
    print("With one hardware queue a rank, these wait for each other." if stuck else "All operations run.")
    return int(bool(stuck))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
