"""Names of a package that are imported at their first use."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any


def late_names(
    package: str, names: Sequence[str], module_with: Callable[[str], ModuleType]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for ``package``, of which ``module_with`` imports the module with a name.

    The package lists the same names under ``TYPE_CHECKING``.
    """
    listed = sorted(names)

    def get(name: str) -> Any:
        if name in listed:
            return getattr(module_with(name), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}{_suggestion(package, name, listed)}")

    return get, lambda: list(listed)


def _suggestion(package: str, name: str, listed: Sequence[str]) -> str:
    # Libraries ask for attributes such as __path__: no help for those.
    if name.startswith("_"):
        return ""
    known = {each.lower(): each for each in listed}
    close = get_close_matches(name.lower(), known, n=1)
    return f". Did you mean {known[close[0]]!r}?" if close else f". dir({package}) lists its names."
