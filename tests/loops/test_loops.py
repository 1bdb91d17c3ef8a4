"""A short draw of training scripts, and what the search says about trainings that differ."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.run_ranks import run_ranks
from tools.loops import actions
from tools.loops.compare import TOLERANCE, Event, difference
from tools.loops.draw import LAYOUTS, Action, Script, draw
from tools.loops.models import make
from tools.loops.ranks import RankTraining
from tools.loops.run import act, run_scripts, written
from tools.loops.training import Training, WholeTraining

SEEDS = (18, 45, 53, 241, 579, 972)
MORE = (4, 5, 13, 16, 19, 21, 24, 26, 28, 37, 47, 49, 51, 59, 60, 67, 69, 73, 79, 166, 199, 382, 433, 766)
"""Of two ranks. Seed 53 is refused, on both ranks before anything is sent, and the start continues.

Seeds 166, 382, 433 and 766 have a tied weight, and 199 ties one. Seed 579 recomputes layers that change buffers. Layers
draw numbers in 45 and 73, and in 19, whose one stage has the numbers of one process. Microbatches have other lengths in
18. 241 has ZeRO-1 by parts of the model, and 972 shards, ``no_sync`` and rows that differ.
"""

FOUR = (299, 278, 507, 1209, 1423)
"""Of four ranks: ZeRO-1 with other numbers of microbatches, optimizers by part, rows that differ, shards."""


def run_with_other(rank: int, seeds: tuple[int, ...], folder: Path) -> None:
    """Run the scripts of ``seeds``, and the first with an action that does something else over ranks."""

    def half(training: Any) -> None:
        if isinstance(training, RankTraining):
            training.groups[0]["lr"] /= 2

    actions.half = half  # type: ignore[attr-defined]  # of this test only
    scripts = [draw(seed) for seed in seeds]
    first = scripts[0]
    object.__setattr__(first, "actions", (first.actions[0], Action("half", {}), *first.actions[1:]))
    run_scripts(rank, scripts, folder)


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [(2, SEEDS), *(pytest.param(*more, marks=pytest.mark.sweep) for more in ((2, MORE), (4, FOUR)))],
    ids=["two ranks", "more of two", "four ranks"],
)
def test_a_short_draw_has_no_silent_difference(ranks: int, seeds: tuple[int, ...], tmp_path: Path) -> None:
    run_ranks(ranks, run_with_other, (seeds[0], *seeds), tmp_path)
    (changed, *found) = (written(tmp_path, place, ranks) for place in range(len(seeds) + 1))
    assert "different" in {outcome.kind for outcome in changed}
    assert any("value of " in outcome.reason for outcome in changed)
    for seed, outcomes in zip(seeds, found, strict=True):
        expected = "refused" if seed == 53 else "equal"
        assert [outcome.kind for outcome in outcomes] == [expected] * ranks, f"{seed}: {outcomes}\n{draw(seed)}"


def test_a_seed_is_a_script() -> None:
    scripts = [draw(seed) for seed in range(300)]
    assert scripts == [draw(seed) for seed in range(300)]
    assert {script.layout for script in scripts} == set(LAYOUTS)
    names = {action.name for script in scripts for action in script.actions}
    assert all(callable(getattr(actions, name)) for name in names)
    assert str(scripts[3].without({0})).count("\n") == str(scripts[3]).count("\n") - 1


def one_process(script: Script) -> dict[type[Training], list[Event]]:
    """The events of ``script`` with microbatches and without."""
    found = {}
    for kind in (Training, WholeTraining):
        training = kind(script, make(script.kind))
        act(training)
        found[kind] = training.events
    return found


def test_the_whole_batch_has_the_numbers_of_its_microbatches() -> None:
    """Both oracles agree where the loss is a mean over equal rows: no rule of microbatches is in their numbers."""
    of_both = one_process(draw(23))
    for one, other in zip(*of_both.values(), strict=True):
        assert not difference(one, other.numbers, {}, TOLERANCE)


def test_a_difference_says_where() -> None:
    event = Event("2: steps(count=1)", "value", {"a": torch.tensor([1.0, 2.0]), "b": None})

    def found(is_whole: bool = False, **numbers: torch.Tensor | None) -> str:
        return difference(event, numbers, {}, 1e-9, is_whole)

    assert not found(a=torch.tensor([1.0, 2.0]), b=torch.zeros(3))
    assert found(a=torch.tensor([1.0, 2.5])) == "value of a: 2.5 for 2"
    assert found(a=torch.tensor([1.0, float("nan")])) == "value of a: not finite in one of them"
    assert found(a=None) == "value of a: none on the rank, one in one process"
    assert found(a=torch.ones(3)) == "value of a: shape (3,) for (2,)"
    assert found(a=torch.ones(2, device="meta")) == "value of a on the meta device"
    assert found(c=torch.ones(2)) == "value of c, which one process does not have"
    assert found(is_whole=True, a=torch.tensor([1.0, 2.0])) == "value without b"
