"""A run as one frame in a terminal."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from nxdpp.counted import counted
from nxdpp.schedules.view.labels import INK
from nxdpp.schedules.view.tables import tables

# Ranks of the table and of the strip; the others are counted.
_RANKS = 16
# Columns before a strip, and of a bar.
_HEAD = 6
_BAR = 10
# Heights of a curve, from the least to the most, and a full and an empty part of a bar.
_HEIGHTS = {False: "▁▂▃▄▅▆▇█", True: "_.-=+*%#"}
_FILLED = {False: ("█", "░"), True: ("#", ".")}
_STYLES = {"fault": "bold red", "done": "green", "left": "yellow"}


def frame(summary: dict[str, Any], console: Console) -> RenderableType:
    """Return what ``summary_of`` has, as wide as ``console``; letters of ASCII where it has no others."""
    ascii_only = console.options.ascii_only
    parts: list[RenderableType] = [_head(summary)]
    # First, as a terminal shows what its height has room for.
    parts += [Text(_printable(_sentence(fault)), style="bold red") for fault in summary["faults"]]
    parts.append(_curves(summary, console.width, ascii_only))
    parts += _ranks(summary, console.width, ascii_only)
    parts += _strip(summary["strip"], [row["rank"] for row in summary["ranks"]], console.width)
    parts += _experts(summary["experts"], console.width, ascii_only)
    parts += _routing(summary["routing"])
    return Group(*parts)


def _head(summary: dict[str, Any]) -> Text:
    of = f" of {summary['steps']:,}" if summary["steps"] else ""
    there, world = len(summary["ranks"]), summary["world"]
    ranks = f"{world} ranks, {summary['schedule']}" if world > 1 else "1 rank"
    ranks = ranks if there == world else f"{there} of {ranks}"
    text = Text(_printable(f"{summary['folder']}  step {summary['step']:,}{of}  {ranks}  "))
    state, ago = summary["state"], _ago(summary["now"] - summary["seen_at"])
    said = {"running": f"last line {ago}", "done": f"done {ago}", "fault": f"ended by a fault {ago}"}
    return text.append(said.get(state) or _printable(f"left {ago} by {summary['left']}"), _STYLES.get(state, ""))


def _curves(summary: dict[str, Any], width: int, ascii_only: bool) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    names = {name: _printable(name) for name in summary["curves"]}
    head = max(map(len, names.values()), default=0) + max(map(len, summary["latest"].values()), default=0) + 2
    for name, shown in names.items():
        values = [value for _, value in summary["curves"][name] if value is not None]
        drawn = _sparkline(values, max(8, min(48, width - head)), ascii_only)
        table.add_row(Text(shown), Text(summary["latest"][name], justify="right"), Text(drawn, style="cyan"))
    return table


def _ranks(summary: dict[str, Any], width: int, ascii_only: bool) -> Iterator[RenderableType]:
    full, empty = _FILLED[ascii_only]
    rows = []
    for row in summary["ranks"][:_RANKS]:
        busy, seconds, ago = row["busy"], row["seconds"], _ago(summary["now"] - row["seen_at"])
        filled = round(_BAR * min(1.0, max(0.0, busy or 0.0)))
        rows.append(
            [
                str(row["rank"]),
                row["stages"],
                "" if busy is None else f"{100 * busy:3.0f}% {full * filled}{empty * (_BAR - filled)}",
                "" if row["bytes"] is None else decimal(row["bytes"]),
                "" if row["step"] is None else f"{row['step']:,}",
                "" if seconds is None else f"{seconds:.3f}",
                ago if row["state"] == "running" else f"{row['state']}, {ago}",
            ]
        )
    yield from tables(("rank", "stages", "busy", "memory", "step", "seconds", "last line"), rows, width)
    more = len(summary["ranks"]) - _RANKS
    if more > 0:
        yield Text(f"and {counted(more, 'more rank')}")


def _strip(strip: dict[str, Any] | None, numbers: Sequence[int], width: int) -> Iterator[RenderableType]:
    """Yield the actions of a step: a row for each of the ranks ``numbers``, a column the action in its middle."""
    if strip is None:
        return
    legend = Text(f"step {strip['step']:,}, {strip['ms']:,.1f} ms  ")
    for kind, (name, colour) in strip["kinds"].items():
        legend.append(kind, f"{INK} on {colour}").append(f" {name}  ")
    yield legend.append(". bubble")
    columns = max(8, width - _HEAD)
    for rank, row in list(zip(numbers, strip["ranks"], strict=True))[:_RANKS]:
        text = Text(f"{rank:>4}  ")
        at = 0
        for column in range(columns):
            time = (column + 0.5) * strip["ms"] / columns
            while at < len(row) - 1 and row[at][4] < time:
                at += 1
            _, kind, colour, start, end = row[at]
            text.append(*((kind, f"{INK} on {colour}") if start <= time <= end else (".", "dim")))
        yield text


def _experts(experts: Sequence[float] | None, width: int, ascii_only: bool) -> Iterator[RenderableType]:
    if experts and sum(experts):
        mean = sum(experts) / len(experts)
        least, most = min(experts) / mean, max(experts) / mean
        said = f"{counted(len(experts), 'expert')}, {least:.2f} to {most:.2f} of the mean  "
        heights = _HEIGHTS[ascii_only]
        drawn = "".join(heights[round((len(heights) - 1) * each / max(experts))] for each in experts)
        yield Text(said + drawn[: max(8, width - len(said))])


def _routing(routing: dict[str, Any] | None) -> Iterator[RenderableType]:
    if routing:
        shares = list(routing["shares_of_ranks"].items())
        shown = ", ".join(f"rank {rank} {100 * share:.0f}%" for rank, share in shares[:_RANKS])
        more = f", and {counted(len(shares) - _RANKS, 'more rank')}" if len(shares) > _RANKS else ""
        over = f"{_printable(routing['largest'])} has {routing['largest_over_mean']:.2f} of the mean"
        yield Text(f"{over}; tokens: {shown}{more}")


def _sentence(fault: dict[str, Any]) -> str:
    others = [rank for rank in fault["told_by"] if rank not in fault["named"]]
    by = f" (told by rank{'s' * (len(others) > 1)} {', '.join(map(str, others))})" if others else ""
    return f"fault: {fault['text']}{by}"


def _printable(text: str) -> str:
    """Return ``text`` with escapes for characters that a terminal would obey; lines remain."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


def _sparkline(values: Sequence[float], columns: int, ascii_only: bool) -> str:
    """Return the values as heights, the mean of neighbours where they are more than ``columns``."""
    if not values:
        return ""
    size = -(-len(values) // columns)
    means = [sum(part) / len(part) for part in (values[at : at + size] for at in range(0, len(values), size))]
    low, high = min(means), max(means)
    heights = _HEIGHTS[ascii_only]
    return "".join(heights[round((len(heights) - 1) * (mean - low) / ((high - low) or 1.0))] for mean in means)


def _ago(seconds: float) -> str:
    """Return an age in words, such as ``3 s ago``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
