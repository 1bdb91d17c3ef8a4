"""Page of the public names, made from their docstrings."""

import ast
import re
import tempfile
import textwrap
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from myst_parser.slugs import github_slugify
from public_names import public_names
from run_sphinx import run_sphinx

_SETTINGS = {
    "root_doc": "api",
    # The last one adds a listener to an event of autodoc.
    "extensions": ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_markdown_builder", "docstrings"],
    "autodoc_member_order": "bysource",
    "autodoc_inherit_docstrings": False,
    "napoleon_custom_sections": [("Attributes", "params_style")],
}

_INTRODUCTION = """
<!-- Made by python docs/site from the docstrings. Do not edit it. -->

The public names, with the docstrings of the code. The [guide](guide/README.md) has examples.
"""


def api_page() -> tuple[str, bool]:
    """Return the page as Markdown, and ``True`` if Sphinx had no warning about a docstring."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "api.rst").write_text(_source(public_names()))
        is_good = run_sphinx("markdown", folder, folder / "made", _SETTINGS)
        text = (folder / "made/api.md").read_text()
    title, text = text.split("\n", 1)
    text = _fences_with_language(_short_headings(text)).strip()
    # Sphinx makes the commas between two exceptions bold too.
    text = _linked_types(text.replace("****,** ", "**, "))
    return f"{title}\n{_INTRODUCTION}\n{_contents(text)}\n{text}\n", is_good


def _source(sections: Mapping[str, list[str]]) -> str:
    """Return directives of autodoc, for the names of each section."""
    lines = ["API", "===", ""]
    for title, names in sections.items():
        lines += [title, "-" * len(title), ""]
        for name in names:
            module, _, last = name.rpartition(".")
            if isinstance(getattr(import_module(module), last), type):
                lines += [f".. autoclass:: {name}", "   :members:", "   :inherited-members: Module, Optimizer", ""]
            else:
                lines += [f".. autofunction:: {name}", ""]
    return "\n".join(lines)


def _short_headings(text: str) -> str:
    """Return the page with names alone as headings: autodoc gives a heading with a signature for each overload."""
    lines: list[str] = []
    for line in text.split("\n"):
        if line.startswith(("### ", "#### ")):
            line = re.sub(r"(?<=\w)\(.+$", "()", line)
            if line in lines[-2:]:
                continue
        lines.append(line)
    return "\n".join(lines)


def _linked_types(text: str) -> str:
    """Return the page with links of types to the headings, which have other anchors than the names of Sphinx."""
    headings = {_name(heading): _anchor(heading) for heading in re.findall(r"^### (.*)", text, flags=re.MULTILINE)}
    return re.sub(r"\]\(#(nxdpp\.[\w.]+)\)", lambda found: f"](#{headings.get(found[1], found[1])})", text)


def _fences_with_language(text: str) -> str:
    """Return the page with ``python`` or ``text`` at each literal block."""

    def replaced(found: re.Match[str]) -> str:
        return f"{found[1]}```{'python' if _is_python(found[2]) else 'text'}\n{found[2]}"

    return re.sub(r"^( *)```default\n(.*?^ *```)", replaced, text, flags=re.MULTILINE | re.DOTALL)


def _is_python(block: str) -> bool:
    try:
        ast.parse(textwrap.dedent(block.rpartition("\n")[0]))
    except SyntaxError:
        return False
    return True


def _contents(text: str) -> str:
    """Return a list of the sections, with links to their names."""
    listed = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, rest = section.partition("\n")
        names = re.findall(r"^### (.*)", rest, flags=re.MULTILINE)
        links = [f"[{_last(name)}](#{_anchor(name)})" for name in names]
        line = f"- **{title}:** " + ", ".join(links)
        listed.append(textwrap.fill(line, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    return "\n".join(listed) + "\n"


def _anchor(heading: str) -> str:
    return github_slugify(re.sub(r"[*\\]", "", heading))


def _name(heading: str) -> str:
    return heading.rpartition(" ")[2].removesuffix("()").replace("\\", "")


def _last(heading: str) -> str:
    return _name(heading).rpartition(".")[2]
