"""Extension of Sphinx: a signature is a block of code under the name, with a parameter a line where it is long."""

import inspect
import re
import typing
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docstrings import prepare_docstring
from sphinx.util.inspect import signature as signature_of
from sphinx.util.inspect import stringify_signature

_COLUMNS = 100
# napoleon's listener has 500. It reads the block as a part of the docstring.
_BEFORE, _AFTER = 100, 600
_WITH_SIGNATURE = ("class", "function", "method")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the listeners, as Sphinx calls it for each extension."""
    app.connect("autodoc-process-signature", _without_signature)
    app.connect("autodoc-process-docstring", _add_signature, priority=_BEFORE)
    app.connect("autodoc-process-docstring", _number_by_place)
    app.connect("autodoc-process-docstring", _restore_property, priority=_AFTER)
    app.connect("autodoc-skip-member", _skip_foreign)
    return {"parallel_read_safe": True}


def _without_signature(app: Sphinx, what: str, *_: Any) -> tuple[str, None] | None:
    return ("", None) if what in _WITH_SIGNATURE else None


def _skip_foreign(app: Sphinx, what: str, name: str, found: Any, skip: bool, options: Any) -> bool | None:
    """Leave out members that a class inherits from another library: their pages are there."""
    function = getattr(found, "fget", None) or getattr(found, "func", None) or found
    owner = getattr(function, "__module__", None) or "nxdpp"
    return True if owner.partition(".")[0] != "nxdpp" else None


def _add_signature(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    if what in _WITH_SIGNATURE:
        last = name.rpartition(".")[2]
        texts = [_signature(one, last) for one in (_shown_overloads(found) or [found])]
        if block := [line for text in texts for line in text]:
            lines[:0] = [".. code-block:: python", "", *("   " + line for line in block), ""]


def _shown_overloads(found: Any) -> list[Any]:
    """Return the overloads of a function, without those that differ in the type of ``self``: it is not shown."""
    overloads = typing.get_overloads(found)
    return [] if any("self" in one.__annotations__ for one in overloads) else list(overloads)


def _number_by_place(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Forget the overloads of a class's methods, which ``_add_signature`` shows, and number the definitions anew.

    Overloads leave gaps in the numbers, and inherited members would be in them.
    """
    if what == "class":
        analyzer = ModuleAnalyzer.for_module(found.__module__)
        analyzer.analyze()
        analyzer.overloads.clear()
        in_order = sorted(analyzer.tagorder, key=analyzer.tagorder.__getitem__)
        analyzer.tagorder = {tag: place for place, tag in enumerate(in_order)}


def _restore_property(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Undo napoleon's change of a property: it takes the text before a colon in the first line for a type."""
    if what == "property":
        lines[:] = prepare_docstring(inspect.getdoc(found) or "")


def _signature(found: Any, name: str) -> list[str]:
    """Return the lines of a definition, or none for an object without a signature of its own."""
    try:
        signature = signature_of(found, bound_method=inspect.ismethod(found))
    except (TypeError, ValueError):
        return []
    parameters = [one for one in signature.parameters.values() if one.name != "self"]
    signature = signature.replace(parameters=parameters)
    text = stringify_signature(
        signature, show_return_annotation=not isinstance(found, type), unqualified_typehints=True
    )
    text = re.sub(r"~(?:\w+\.)*(\w+)", r"\1", text)
    if len(name + text) <= _COLUMNS:
        return [name + text]
    end = _closing(text)
    return [f"{name}(", *(f"    {part}," for part in _parts(text[1:end])), text[end:]]


def _closing(text: str) -> int:
    """Return the place of the bracket that closes the first one of ``(a: X, b) -> Y``."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place
    raise AssertionError(text)


def _parts(text: str) -> list[str]:
    """Return the parameters of ``a: X[b, c], d: e``, divided at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in "[({") - (character in "])}")
        if character == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [*parts, text[start:].strip()]
