"""Training scripts as data, drawn at random from a seed."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.loops.models import DRAWS, READS, Kind

Arguments = dict[str, Any]

LAYOUTS = {
    "pp2": (1, 2, 1),
    "pp4": (1, 4, 1),
    "tp2": (2, 1, 1),
    "dp2": (1, 1, 2),
    "pp2 dp2": (1, 2, 2),
    "tp2 pp2": (2, 2, 1),
}
"""Numbers of tensor-parallel ranks, of ranks in a pipeline and of replicas."""
_LAYOUT_WEIGHTS = (8, 5, 2, 2, 3, 2)
SCHEDULES = ("1f1b", "interleaved", "zb1p", "zb-v")

# What is refused over shards.
_NOT_OVER_SHARDS = ("replace", "replace_parameter", "adapt", "tie", "gradient_hook")
_WHOLE = ("Muon", "Adafactor")

_NAMES = ("embed", "head", "norm", "layers.0", "layers.3", "side", "down", "weight", "")
_MODULES = ("embed", "head", "norm", "layers.0", "layers.2.norm", "layers.3.side", "layers.1.up", "layers")
_TYPES = ("Linear", "Embedding", "LayerNorm")
_ROOTS = ("wrapped", "wrapped", "wrapped", "module", "local")


@dataclass(frozen=True)
class Action:
    """A line of a script: the function of ``actions`` and its arguments."""

    name: str
    arguments: Arguments

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.arguments.items())})"


@dataclass(frozen=True)
class Script:
    """A training script.

    Attributes:
        layout: key of ``LAYOUTS``.
        microbatches: of each replica.
        rows: of the batch of all replicas.
        length: number of tokens in a row.
        zero1: the optimizers are ``Zero1Optimizer``.
        shards: parameters are divided over the replicas.
    """

    seed: int
    layout: str
    schedule: str
    microbatches: int
    rows: int
    length: int
    zero1: bool
    shards: bool
    kind: Kind
    actions: tuple[Action, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        tensor, pipeline, data = LAYOUTS[self.layout]
        return tensor * pipeline * data

    @property
    def has_equal_rows(self) -> bool:
        """``True`` if each step's loss is a mean over rows that are alike: one process then needs no microbatches.

        It is not where microbatches have other numbers of rows or lengths, where a module sees the rows of its
        microbatch (running means) or draws from torch's generator, and where hooks see the gradient of each backward.
        """
        own = self.rows // LAYOUTS[self.layout][2]
        return (
            not self.kind.running
            and not (self.kind.noise and self.kind.draws == "torch's")
            and not any(
                action.arguments.get("cut")
                or action.arguments.get("kind") in ("clamp", "after")
                or (action.name == "microbatches" and own % (action.arguments["count"] or 1))
                for action in self.actions
            )
        )

    @property
    def mixes_rows(self) -> bool:
        """``True`` if some microbatches are to have no floats."""
        return any(action.name == "mix_rows" for action in self.actions)

    @property
    def subjects(self) -> set[str]:
        """The names of its actions, and what its model, its batches and its layout have."""
        waits = any(action.name == "accumulate" and not action.arguments["syncs"] for action in self.actions)
        more = {
            "compared without microbatches": self.has_equal_rows,
            "draws: torch's": self.kind.draws == "torch's",
            "draws: the layer's": self.kind.draws == "the layer's",
            "draws: the script's": self.kind.draws == "the script's",
            "floats": self.kind.floating,
            "lengths that differ": any(action.arguments.get("cut") for action in self.actions),
            "shards": self.shards,
            "shards and no_sync": self.shards and waits,
            "ZeRO-1": self.zero1,
        }
        return {action.name for action in self.actions} | {name for name, is_there in more.items() if is_there}

    def without(self, places: set[int]) -> "Script":
        """The script without the actions at ``places``."""
        kept = tuple(action for place, action in enumerate(self.actions) if place not in places)
        return dataclasses.replace(self, actions=kept)

    def __str__(self) -> str:
        fields = {name: value for name, value in vars(self).items() if name not in ("actions", "kind")}
        lines = [json.dumps(fields), json.dumps(vars(self.kind)), *map(str, self.actions)]
        return "\n".join(f"    {line}" for line in lines)


def draw(seed: int) -> Script:
    """Return the script of ``seed``."""
    random = Random(seed)
    (layout,) = random.choices(list(LAYOUTS), _LAYOUT_WEIGHTS)
    _, pipeline, data = LAYOUTS[layout]
    schedule = random.choice(SCHEDULES) if pipeline > 1 else "1f1b"
    stages = pipeline * (1 if schedule == "1f1b" else 2)
    microbatches = random.choice((1, 2, 4)) if pipeline == 1 else random.choice((pipeline, 4))
    kind = Kind(
        layers=max(4, stages),
        tied=random.random() < 0.35,
        adapted=random.random() < 0.25,
        # A replica sees only its rows, so a running mean is not the mean of one process.
        running=random.random() < 0.2 and data == 1,
        reads=random.choice(READS),
        weighted=random.random() < 0.1,
    )
    # The models and actions that were drawn first stay those of their seeds.
    more = Random(f"{seed}, more")
    (draws,) = more.choices(DRAWS[:3], (6, 2, 0 if data > 1 else 1))
    kind = dataclasses.replace(kind, floating=more.random() < 0.3, draws=draws)
    rows = microbatches * data * random.choice((1, 2))
    actions = [Action("optimizer", _optimizer(random))]
    if random.random() < 0.7:
        actions.append(_steps(random))
    for _ in range(random.randint(2, 5)):
        (name,) = random.choices(list(_DRAWN), [weight for weight, _ in _DRAWN.values()])
        arguments = _DRAWN[name][1](random)
        if name == "gradient_hook" and data > 1:
            # A hook sees the gradient of a replica: only a linear one is the same in one process.
            arguments["kind"] = "scale"
        actions.append(Action(name, arguments))
        if random.random() < 0.65:
            actions.append(_steps(random))
    actions.append(Action("steps", {"count": 2}))
    zero1 = data > 1 and random.random() < 0.3
    length = random.choice((3, 4, rows))
    for _ in range(more.choice((0, 0, 1, 2))):
        (name,) = more.choices(list(_DRAWN_LATER), [weight for weight, _ in _DRAWN_LATER.values()])
        place = more.randint(1, len(actions) - 1)
        actions[place:place] = [Action(name, _DRAWN_LATER[name][1](more)), *([_steps(more)] * more.choice((0, 1)))]
    last = Random(f"{seed}, last")
    if last.random() < 0.4:
        (name,) = last.choices(list(_DRAWN_LATER), [weight for weight, _ in _DRAWN_LATER.values()])
        place = last.randint(1, len(actions) - 1)
        actions[place:place] = [Action(name, _DRAWN_LATER[name][1](last)), _steps(last)]
    if any(action.name == "mix_rows" for action in actions):
        kind = dataclasses.replace(kind, floating=True)
    if not kind.draws and last.random() < 0.2:
        kind = dataclasses.replace(kind, draws="the script's")
    if kind.draws == "the layer's" or (kind.draws == "torch's" and layout == "tp2"):
        kind = dataclasses.replace(kind, noise=0.1)
    shards = data > 1 and not zero1 and more.random() < (0.1 if _refused_over_shards(actions) else 0.8)
    if data > 1 and not zero1 and last.random() < 0.5:
        # A step over shards adds the gradients of two calls, of which the first is in no_sync().
        shards, actions = True, _fit_for_shards(actions)
        actions.insert(last.randint(1, len(actions) - 1), Action("accumulate", {"count": 2, "syncs": False}))
    actions = _loadable(actions, kind)
    return Script(seed, layout, schedule, microbatches, rows, length, zero1, shards, kind, tuple(actions))


def _refused_over_shards(actions: list[Action]) -> bool:
    return any(action.name in _NOT_OVER_SHARDS or action.arguments.get("kind") in _WHOLE for action in actions)


def _loadable(actions: list[Action], kind: Kind) -> list[Action]:
    """``actions`` that load the values of the layers alone where the model has got other names or shapes."""
    kept: list[Action] = []
    for action in actions:
        is_whole = action.name == "load_values" and not action.arguments["what"]
        if is_whole and any(_renames(each, kind) for each in kept):
            action = Action(action.name, action.arguments | {"what": "layers"})
        kept.append(action)
    return kept


def _renames(action: Action, kind: Kind) -> bool:
    """``True`` if an action gives parameters other names or shapes."""
    what = action.arguments.get("what")
    is_other = what == "embed" or (kind.adapted and what == "layers.2.side")
    return action.name == "adapt" or (action.name == "replace" and is_other)


def _fit_for_shards(actions: list[Action]) -> list[Action]:
    """``actions`` without those that are refused over shards, and with AdamW for the optimizers that are."""
    kept = [action for action in actions if action.name not in _NOT_OVER_SHARDS]
    fitting = {"kind": "AdamW"}
    return [
        Action(each.name, each.arguments | fitting) if each.arguments.get("kind") in _WHOLE else each for each in kept
    ]


def _steps(random: Random) -> Action:
    return Action("steps", {"count": random.choice((1, 1, 2, 3))})


def _optimizer(random: Random) -> Arguments:
    kinds = ("SGD", "momentum", "AdamW", "AdamW", "AdamW", "Adagrad", "Adafactor", "Muon")
    return {"kind": random.choice(kinds), "groups": random.choice(("all", "all", "name", "type", "size", "trained"))}


def _freeze(random: Random) -> Arguments:
    return {"root": random.choice(_ROOTS), **_selected(random), "trained": random.random() < 0.3}


def _selected(random: Random) -> Arguments:
    by = random.choice(("name", "name", "module", "type"))
    return {"by": by, "what": random.choice({"name": _NAMES[:-2], "module": _MODULES, "type": _TYPES}[by])}


def _changed(random: Random) -> Arguments:
    return {"root": random.choice(_ROOTS), **_selected(random)}


def _replace(random: Random) -> Arguments:
    what = ("head", "head", "norm", "embed", "layers.0", "layers.3", "layers.1.norm", "layers.2.side")
    return {"what": random.choice(what), "makes_optimizer": random.random() < 0.7}


def _of(**values: tuple[Any, ...]) -> Callable[[Random], Arguments]:
    """A function that draws one of the values of each argument."""
    return lambda random: {name: random.choice(each) for name, each in values.items()}


_DRAWN: dict[str, tuple[int, Callable[[Random], Arguments]]] = {
    "freeze": (10, _freeze),
    "optimizer": (4, _optimizer),
    "add_group": (2, _of(what=_NAMES[:-2])),
    "learning_rate": (2, _of(factor=(0.5, 2.0), group=(0, -1, None))),
    "initialise": (4, _changed),
    "scale_values": (3, _changed),
    "replace": (7, _replace),
    "adapt": (3, _of(what=("head", "layers.0.side", "layers.3.side"), makes_optimizer=(True, True, False))),
    "replace_parameter": (3, _of(what=("head.weight", "norm.weight", "embed.weight", "layers.2.norm.bias"))),
    "tie": (2, _of(makes_optimizer=(True, False))),
    "gradient_hook": (5, lambda random: {**_changed(random), "kind": random.choice(("clamp", "scale", "after"))}),
    "forward_hook": (4, _of(what=_MODULES[:-1], kind=("output", "input", "record"))),
    "mode": (5, _of(root=("wrapped", "module"), what=("", "", *_MODULES), trains=(True, False))),
    "evaluate": (4, _of(switches=(True, False))),
    "clip": (4, _of(norm=(0.1, 1.0, None), kind=("method", "method", "method", "torch"))),
    "save_and_load": (4, _of(steps=(0, 1, 2), makes=(True, False))),
    "files": (4, _of(way=("checkpoint", "gathered", "gathered"))),
    "state": (3, _of(root=("wrapped", "module", "local"))),
    "load_values": (4, _of(root=("wrapped", "wrapped", "module"), what=("", "", "head", "layers"))),
    "buffer": (4, _of(what=("scale", "layers.3.mean"), kind=("fill", "assign", "register"))),
    "accumulate": (3, _of(count=(1, 2), syncs=(True, False))),
    "keep_gradients": (2, _of(how=("zeros", "none", "kept"))),
    "recompute": (2, _of()),
    "attribute": (4, _of(what=("", "layers.0", "layers.3"), value=(0.5, 2.0))),
    "enable_adapters": (3, _of(enabled=(True, False))),
    "batch": (3, _of(rows=(1, 2), length=(2, 3, 5))),
    "remember": (2, _of(root=("wrapped", "local"), steps=(1, 2))),
}
"""Weight and arguments of each action."""

_DRAWN_LATER: dict[str, tuple[int, Callable[[Random], Arguments]]] = {
    "microbatches": (4, _of(count=(1, 2, 3, 4, 5, None))),
    "mix_rows": (3, _of(with_signal=("even", "odd", "first", "none"), cut=(0, 0, 1))),
    "optimizers_by_part": (4, _of(kind=("SGD", "AdamW", "Adagrad"), other=("AdamW", "momentum"), every=(1, 2))),
    "evaluate_rows": (2, _of(rows=(1, 3, 5), everywhere=(True, False))),
    "accumulate": (1, _of(count=(2,), syncs=(False,))),
}
"""Weight and arguments of actions at any place of the script."""
