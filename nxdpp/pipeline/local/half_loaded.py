"""Models and optimizers that a failed load has left with values of two origins.

Their steps and saves are refused until a load succeeds. The mark is an attribute: copies have it too.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.optim import Optimizer

from nxdpp.pipeline.local.changes import Change, note_in_all_models

_MARK = "_nxdpp_half_loaded"


class HalfLoad(NamedTuple):
    """A load that failed after it had begun to change tensors: a sentence on it, and the names of the tensors."""

    sentence: str = ""
    names: frozenset[str] = frozenset()


def mark(each: object, sentence: str, names: Iterable[str]) -> None:
    """Mark a module or an optimizer, of which a load may have changed the tensors ``names``."""
    if isinstance(each, Optimizer) and not half_load_of(each).sentence:
        each.register_step_pre_hook(_refuse_step)
    vars(each)[_MARK] = HalfLoad(sentence, half_load_of(each).names.union(names))
    # The next step looks again at what it found out about the model.
    note_in_all_models(Change.VALUES)


def clear(each: object) -> None:
    """Take the mark away, after a load that has succeeded."""
    vars(each).pop(_MARK, None)


def half_load_of(each: object) -> HalfLoad:
    """Return the mark; an empty one without a failed load."""
    found: HalfLoad = vars(each).get(_MARK, HalfLoad())
    return found


def _refuse_step(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
    check_whole(optimizer)


def check_whole(each: object) -> None:
    """Raise ``RuntimeError`` for a module or an optimizer that a failed load has changed."""
    sentence = half_load_of(each).sentence
    if sentence:
        raise RuntimeError(
            f"{sentence} Values are of two origins since then: steps and saves are refused until a load succeeds. Load "
            f"again."
        )
