"""A script with fewer actions that has the same outcome."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from tools.loops.draw import Script
from tools.loops.models import Kind
from tools.loops.run import Outcome, outcomes


def shrunk(script: Script) -> tuple[Script, Outcome]:
    """Leave out actions and options while the outcome stays; return the smallest script."""
    ((_, outcome),) = outcomes([script])
    while smaller := _first(_simpler(script), outcome):
        script, outcome = smaller
    return script, outcome


def _first(scripts: Iterator[Script], wanted: Outcome) -> tuple[Script, Outcome] | None:
    """The first script that is ``wanted`` too, if refused for the same reason. All of them run in one start."""
    candidates = list(scripts)
    found = {id(script): outcome for script, outcome in outcomes(candidates)}
    for script in candidates:
        outcome = found[id(script)]
        if outcome.kind == wanted.kind and (outcome.kind != "refused" or outcome.short == wanted.short):
            return script, outcome
    return None


def _simpler(script: Script) -> Iterator[Script]:
    """Scripts with less in them, those with the most left out first."""
    places = range(1, len(script.actions))
    for count in (len(script.actions) // 2, 2):
        if count > 1:
            yield from (script.without(set(range(first, first + count))) for first in places)
    yield from (script.without({place}) for place in places)
    for place, action in enumerate(script.actions):
        if action.name == "steps" and action.arguments["count"] > 1:
            fewer = dataclasses.replace(action, arguments={"count": 1})
            yield dataclasses.replace(script, actions=(*script.actions[:place], fewer, *script.actions[place + 1 :]))
    for field in dataclasses.fields(Kind):
        if field.name != "layers" and getattr(script.kind, field.name) != field.default:
            default: dict[str, Any] = {field.name: field.default}
            kind = dataclasses.replace(script.kind, **default)
            yield dataclasses.replace(script, kind=kind)
    simplest = dataclasses.replace(
        script, layout="pp2", schedule="1f1b", microbatches=2, rows=4, zero1=False, shards=False
    )
    if simplest != script:
        yield dataclasses.replace(simplest, kind=dataclasses.replace(script.kind, layers=4))
