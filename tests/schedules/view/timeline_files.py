"""Timeline files of simulated steps, as a run would write them."""

import json
from typing import Any

from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.simulate import Timeline

HEADS = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "pipeline 0"}}]


def heads(ranks: int) -> list[dict[str, Any]]:
    rows = [
        {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        for rank in range(ranks)
    ]
    return HEADS + rows


def events(timeline: Timeline, step: int, transfer: float = 0.0) -> list[dict[str, Any]]:
    """Return the events of a step; a rank waits for a transfer from the end of its action before."""
    ends = {span.action: span.end for rank in timeline.spans for span in rank}
    rank_of = {span.action.stage: rank for rank, spans in enumerate(timeline.spans) for span in spans}
    found = []
    for rank, spans in enumerate(timeline.spans):
        found.append(_event(f"step {step}, train, made up", "step", rank, 0.0, timeline.makespan, {"step": step}))
        before = 0.0
        for span in spans:
            stage, kind, microbatch, _ = span.action
            arguments = {"step": step, "kind": kind.value, "stage": stage, "microbatch": microbatch}
            source = stage + (-1 if kind is ActionKind.FORWARD else 1)
            made = ends.get(span.action._replace(stage=source))
            if made is not None and kind is not ActionKind.WEIGHT_GRADIENT and rank_of[source] != rank:
                letter = "F" if kind is ActionKind.FORWARD else "B"
                there = max(before, made + transfer)
                found.append(_event("wait", "wait", rank, before, there, arguments | {"kind": letter, "other": source}))
            found.append(_event(str(span.action), "compute", rank, span.start, span.end, arguments))
            before = span.end
    return found


def text(parts: list[dict[str, Any]]) -> str:
    return "[\n" + ",\n".join(map(json.dumps, parts)) + "\n]\n"


def _event(name: str, category: str, rank: int, start: float, end: float, arguments: dict[str, Any]) -> dict[str, Any]:
    # The clock starts long before the step.
    times = {"ts": 7e6 + 1000 * start, "dur": 1000 * (end - start)}
    return {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": rank, **times, "args": arguments}
