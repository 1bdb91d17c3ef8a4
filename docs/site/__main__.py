"""Command that makes the documentation: ``python docs/site``.

::

    docstrings ── autodoc, sphinx-markdown-builder ──▶ docs/api.md ─┐
    README.md, CHANGELOG.md, docs/ ─────────────────────────────────┴─ MyST ──▶ build/site
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The clone's own package, also where another one is installed.
sys.path.insert(0, str(ROOT))


def main() -> int:
    """Write ``docs/api.md`` and the site; 1 for a warning such as a broken link, or an old page with ``--check``."""
    parser = argparse.ArgumentParser(prog="python docs/site", description="docs/api.md and the site of all pages.")
    parser.add_argument("--output", type=Path, default=ROOT / "build/site", help="folder of the site")
    parser.add_argument("--check", action="store_true", help="leave docs/api.md as it is, and fail if it is old")
    arguments = parser.parse_args()

    from api_page import api_page
    from web_site import make_site

    file = ROOT / "docs/api.md"
    page, is_good = api_page()
    if not arguments.check:
        file.write_text(page)
    elif not file.exists() or file.read_text() != page:
        print("docs/api.md is not that of the docstrings: run python docs/site", file=sys.stderr)
        is_good = False
    is_good &= make_site(ROOT, arguments.output)
    print(arguments.output / "README.html" if is_good else "the lines above are errors", file=sys.stderr)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
