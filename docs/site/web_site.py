"""Site of README and all pages, at the paths that they have in the clone. A link to a missing place is a warning."""

from pathlib import Path

from run_sphinx import run_sphinx
from sphinx.application import Sphinx

_SETTINGS = {
    "extensions": ["myst_parser"],
    "root_doc": "README",
    "include_patterns": ["README.md", "CHANGELOG.md", "docs/*.md", "docs/guide/*.md"],
    "myst_heading_anchors": 4,
    "html_theme": "alabaster",
    "html_theme_options": {"page_width": "1100px", "sidebar_width": "240px"},
    "html_copy_source": False,
    # Drawings and lines of a terminal are in fences without a language.
    "highlight_language": "text",
    "suppress_warnings": ["misc.highlighting_failure"],
}

_CONTENTS = """

```{toctree}
:hidden:
:glob:
docs/guide/README
docs/api
docs/guide/*
docs/*
CHANGELOG
```
"""


def make_site(source: Path, output: Path) -> bool:
    """Write the site of the clone ``source``, and return ``True`` if every link leads to a page or a heading."""
    return run_sphinx("html", source, output, _SETTINGS, _add_contents)


def _add_contents(app: Sphinx) -> None:
    """Add the list of pages to the first page, for the sidebar."""

    def listener(app: Sphinx, name: str, source: list[str]) -> None:
        if name == app.config.root_doc:
            source[0] += _CONTENTS

    app.connect("source-read", listener)
