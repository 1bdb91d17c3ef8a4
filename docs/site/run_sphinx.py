"""One run of Sphinx, with its settings in Python."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils


def run_sphinx(
    builder: str,
    source: Path,
    output: Path,
    settings: Mapping[str, Any],
    prepare: Callable[[Sphinx], object] | None = None,
) -> bool:
    """Build ``source`` into ``output``, and return ``True`` if there was no warning; warnings go to stderr.

    ``prepare`` is called with the application before it builds.
    """
    common = {"project": "nxdpp", "language": "en", "smartquotes": False}
    # Names that a run adds to docutils are removed after it.
    with tempfile.TemporaryDirectory() as kept, patch_docutils(), docutils_namespace():
        app = Sphinx(
            source, None, output, kept, builder, {**common, **settings}, status=None, freshenv=True, warningiserror=True
        )
        if prepare is not None:
            prepare(app)
        app.build()
        return app.statuscode == 0
