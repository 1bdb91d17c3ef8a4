"""Page of the public names on the site: directives of autodoc, and an extension of Sphinx that selects members."""

from importlib import import_module
from typing import Any

from public_names import public_names
from sphinx.application import Sphinx
from sphinx.util.docstrings import prepare_docstring
from sphinx.util.inspect import getdoc

SETTINGS = {
    # The last one is this file: it adds listeners to events of autodoc.
    "extensions": ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "api_page"],
    "autodoc_member_order": "bysource",
    "autodoc_inherit_docstrings": False,
    "autodoc_typehints_format": "short",
    "autodoc_preserve_defaults": True,
    "maximum_signature_line_length": 100,
    "python_use_unqualified_type_names": True,
    "napoleon_custom_sections": [("Attributes", "params_style")],
}

# napoleon's listener has 500.
_AFTER_NAPOLEON = 600


def api_page() -> str:
    """Return the page as Markdown of MyST, in which autodoc writes the docstrings."""
    lines = ["# API", "", "The public names, with their docstrings. The [guide](guide/README.md) has examples.", ""]
    for title, names in public_names().items():
        lines += [f"## {title}", "", "```{eval-rst}"]
        for name in names:
            module, _, last = name.rpartition(".")
            if isinstance(getattr(import_module(module), last), type):
                lines += [f".. autoclass:: {name}", "   :members:", "   :inherited-members: Module, Optimizer", ""]
            else:
                lines += [f".. autofunction:: {name}", ""]
        lines += ["```", ""]
    return "\n".join(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the listeners, as Sphinx calls it for each extension."""
    app.connect("autodoc-skip-member", _skip_foreign)
    app.connect("autodoc-process-docstring", _restore_property, priority=_AFTER_NAPOLEON)
    return {"parallel_read_safe": True}


def _skip_foreign(app: Sphinx, what: str, name: str, found: Any, skip: bool, options: Any) -> bool | None:
    """Leave out members that a class inherits from another library: their pages are there."""
    function = getattr(found, "fget", None) or getattr(found, "func", None) or found
    owner = getattr(function, "__module__", None) or "nxdpp"
    return True if owner.partition(".")[0] != "nxdpp" else None


def _restore_property(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Undo napoleon's change of a property: it takes the text before a colon in the first line for a type."""
    if what == "property":
        lines[:] = prepare_docstring(getdoc(found) or "")
