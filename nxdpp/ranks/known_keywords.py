"""Functions that name the keyword which an unknown one may have been meant for."""

import functools
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, TypeVar, cast

_SIMILARITY = 0.5

_Function = TypeVar("_Function", bound=Callable[..., Any])


def knows_its_keywords(function: _Function) -> _Function:
    """Make ``function`` raise ``TypeError`` for an unknown keyword with the name that was meant, if one is close.

    Of an ``__init__`` the message names the class.
    """
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind in kinds and parameter.name != "self"]
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        unknown = [each for each in kwargs if each not in known]
        if unknown:
            shown = ", ".join(f"{each}{_meant(each, known)}" for each in unknown)
            raise TypeError(f"{name} takes no {shown}. help({name}) has its arguments.")
        return function(*args, **kwargs)

    return cast(_Function, checked)


def _meant(name: str, known: list[str]) -> str:
    found = get_close_matches(name.lower(), known, 1, _SIMILARITY)
    return f" (did you mean {found[0]!r}?)" if found else ""
