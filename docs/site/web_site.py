"""Site of README and all pages, at the paths that they have in the clone. A link to a missing place is a warning."""

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

_SETTINGS = {
    "project": "nxdpp",
    "language": "en",
    "smartquotes": False,
    "root_doc": "README",
    "include_patterns": [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs/*.md",
        "docs/guide/*.md",
        "benchmarks/results/*.md",
    ],
    "myst_heading_anchors": 4,
    "html_theme": "alabaster",
    # A line of 120 columns has 940 pixels at most in this size of a monospaced letter.
    "html_theme_options": {
        "page_width": "1340px",
        "sidebar_width": "240px",
        "body_max_width": "none",
        "code_font_size": "13px",
    },
    "html_copy_source": False,
    # Drawings and lines of a terminal are in fences without a language.
    "highlight_language": "text",
    "suppress_warnings": ["misc.highlighting_failure"],
}

_GUIDE = "docs/guide/README"
_REFERENCE = {
    "reference": ["docs/api", "docs/*"],
    "measurements": ["benchmarks/results/*"],
    "project": ["C*"],
}
"""Parts of the sidebar below those of the guide."""


def contents(guide: str) -> str:
    """Return the lists of pages for the sidebar: a part for each table of ``guide``, the text of its first page."""
    parts: dict[str, list[str]] = {"guide": [_GUIDE]}
    for line in guide.splitlines():
        if heading := re.fullmatch(r"\| (.+) \| \|", line):
            listed = parts[heading[1]] = []
        elif row := re.match(r"\| \[.*?\]\((\w+)\.md\)", line):
            listed.append(f"docs/guide/{row[1]}")
    return "".join(_part(caption, pages) for caption, pages in (parts | _REFERENCE).items())


def _part(caption: str, pages: Sequence[str]) -> str:
    listed = "\n".join(pages)
    return f"\n\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n{listed}\n```\n"


def make_site(
    source: Path, output: Path, pages: Mapping[str, str] | None = None, settings: Mapping[str, Any] | None = None
) -> bool:
    """Write the site of the clone ``source``, and return ``True`` if there was no warning; warnings go to stderr.

    ``pages`` has the text of pages that the site shows in place of the clone's, such as the whole ``docs/api``.
    """
    replaced, more = pages or {}, dict(settings or {})
    extensions = ["myst_parser", *more.pop("extensions", ())]

    def listener(app: Sphinx, name: str, text: list[str]) -> None:
        text[0] = replaced.get(name, text[0])
        if name == app.config.root_doc:
            # The list of pages, for the sidebar.
            text[0] += contents((source / f"{_GUIDE}.md").read_text(encoding="utf-8"))

    # Names that a run adds to docutils are removed after it.
    with tempfile.TemporaryDirectory() as kept, patch_docutils(), docutils_namespace():
        options = {**_SETTINGS, **more, "extensions": extensions}
        app = Sphinx(source, None, output, kept, "html", options, status=None, freshenv=True, warningiserror=True)
        app.connect("source-read", listener)
        app.build()
        return app.statuscode == 0
