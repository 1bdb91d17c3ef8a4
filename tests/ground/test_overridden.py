"""Private methods that classes of nxdpp have in place of another library's are listed, and take what theirs take."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

import pytest

import nxdpp
from nxdpp.generation.driven_model import DrivenModel
from nxdpp.ground import torch_names
from nxdpp.ground.names import PrivateAttribute
from nxdpp.ground.transformers_names import OVERRIDDEN

LISTED = {each.name for each in (*OVERRIDDEN, *vars(torch_names).values()) if isinstance(each, PrivateAttribute)}
_OTHERS = ("torch", "transformers", "trl", "accelerate", "peft")
# Made by metaclasses.
_MADE = ("_abc_impl", "_backward_cls")


def test_every_overridden_method_is_listed() -> None:
    wrong = [f"{own.__module__}.{own.__qualname__}.{name}" for own, name, _ in _overridden() if name not in LISTED]
    assert not wrong, "put them into OVERRIDDEN:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", OVERRIDDEN, ids=lambda name: name.path)
def test_the_installed_version_has_the_method(name: PrivateAttribute) -> None:
    assert resolve_name(name.path) is not None, f"{name.path} has gone; with it nxdpp {name.use}"


def test_methods_take_what_theirs_take() -> None:
    """A version may give a method one more argument."""
    wrong = [
        f"{own.__qualname__}.{name}{inspect.signature(mine)} for {inspect.signature(theirs)}"
        for own, name, theirs in _overridden()
        if callable(mine := getattr(own, name)) and not _takes(mine, theirs)
    ]
    assert not wrong, "\n".join(wrong)


def _overridden() -> Iterator[tuple[type, str, Any]]:
    """Each private method of a class of nxdpp that a class of another library has, and that one's."""
    for own in {*_classes()}:
        bases = [base for base in own.__mro__ if base.__module__.partition(".")[0] in _OTHERS]
        bases += [resolve_name("transformers.GenerationMixin")] if own is DrivenModel else []
        for name in vars(own):
            if name.startswith("_") and not name.startswith("__") and name not in _MADE:
                yield from ((own, name, getattr(base, name)) for base in bases[:1] if hasattr(base, name))


def _classes() -> Iterator[type]:
    for module in pkgutil.walk_packages(nxdpp.__path__, "nxdpp."):
        if module.name.endswith("__main__"):
            continue
        for each in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(each) and each.__module__.startswith("nxdpp."):
                yield each


def _takes(mine: Any, theirs: Any) -> bool:
    try:
        ours, given = (inspect.signature(each).parameters.values() for each in (mine, theirs))
    except (TypeError, ValueError):
        return True
    kinds = {each.kind for each in ours}
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} & kinds:
        return True
    needed = {each.name for each in given if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    return needed <= {each.name for each in ours}
