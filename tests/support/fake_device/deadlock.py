"""Replay of the logs of all ranks: could the operations of communicators wait in a circle with one hardware queue?

A run that ended well may have been lucky: each communicator had a queue of its own. With one queue a rank, as with
``CUDA_DEVICE_MAX_CONNECTIONS=1``, an operation blocks all that was launched behind it. Two actors a rank are replayed:
the host, which launches, connects communicators and waits, and the queue, which runs what was launched in its order.
The set-up of a communicator copies through the same queue: it comes after all that was launched before.

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
    """Return a circle of ranks, each with what it stands before for the next one; nothing if all operations run.

    If the log of a rank has ended without what others wait for, the ranks that lead to it.
    """
    hosts = {rank: _numbered(lines, rank) for rank, lines in logs.items()}
    connects = {
        rank: {line["names"][0]: place for place, line in enumerate(lines) if line["kind"] == "connect"}
        for rank, lines in hosts.items()
    }
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
                elif done[rank] < len(queues[rank]) or _not_connected(line, connects, at):
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
    stuck = {rank: _stuck(rank, queues, done) for rank in logs if done[rank] < len(queues[rank])}
    for rank in logs:
        if rank not in stuck and at[rank] < len(hosts[rank]):
            line = hosts[rank][at[rank]]
            stuck[rank] = Stuck(rank, f"the host, in {_words(line)}", _not_connected(line, connects, at))
    return _circle(stuck)


def _circle(stuck: dict[int, Stuck]) -> list[Stuck]:
    path: dict[int, Stuck] = {}
    rank = min(stuck, default=-1)
    while rank in stuck and rank not in path:
        path[rank] = stuck[rank]
        rank = next((each for each in path[rank].waits_for if each not in path), path[rank].waits_for[0])
    ranks = list(path)
    return [path[each] for each in ranks[ranks.index(rank) if rank in path else 0 :]]


def _numbered(lines: list[Line], rank: int) -> list[Line]:
    """Number the messages of each pair and way within a communicator; they match in this order.

    Groups that are made again have the names of the first ones: their communicators are numbered too.
    """
    counts: Counter[Any] = Counter()
    return [_named(line, rank, counts) for line in lines]


def _named(line: Line, rank: int, counts: Counter[Any]) -> Line:
    names = []
    for part in line.get("parts", [line]):
        if part["kind"] in ("send", "recv"):
            pair: tuple[Any, Any] = (rank, part["peer"]) if part["kind"] == "send" else (part["peer"], rank)
        else:
            pair = ("all", "all")
        key = (line.get("communicator"), *pair)
        names.append((*key, counts[part["kind"], key]))
        counts[part["kind"], key] += 1
    return {**line, "names": names}


def _not_connected(line: Line, connects: dict[int, dict[Any, int]], at: dict[int, int]) -> tuple[int, ...]:
    """Return the members whose hosts have not come to the making of this communicator; none for another line."""
    if line["kind"] != "connect":
        return ()
    return tuple(
        member
        for member in line["ranks"]
        if at.get(member, 0) < connects.get(member, {}).get(line["names"][0], sys.maxsize)
    )


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
    return Stuck(rank, _words(line), tuple(missing or sorted(_partners(rank, line))))


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
