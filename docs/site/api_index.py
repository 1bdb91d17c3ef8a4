"""Index of the public names: one line for each, from the first sentence of its docstring."""

import inspect
import re
from importlib import import_module

from public_names import public_names

_INTRODUCTION = """\
# API

<!-- Made by python docs/site from the docstrings. Do not edit it. -->

All public names. `help(nxdpp.NxDPPModel)` and the site of `python docs/site` have arguments, errors and methods; the
[guide](guide/README.md) has examples.
"""


def api_index() -> str:
    """Return the index as Markdown: a section for each subject, a line for each name."""
    lines = [_INTRODUCTION]
    for title, names in public_names().items():
        # Two names of one object share a line.
        by_object: dict[str, list[str]] = {}
        for name in names:
            module, _, last = name.rpartition(".")
            by_object.setdefault(_sentence(getattr(import_module(module), last)), []).append(f"`{last}`")
        module = names[0].rpartition(".")[0]
        lines += [f"## {title}: `{module}`", ""]
        lines += [f"- {', '.join(shown)}: {text}" for text, shown in by_object.items()]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _sentence(found: object) -> str:
    """Return the first sentence of a docstring in Markdown, without its "Return"."""
    first = " ".join((inspect.getdoc(found) or "").partition("\n\n")[0].split()).replace("``", "`")
    return re.split(r"\.(?= [A-Z`]|$)", first.removeprefix("Return "))[0]
