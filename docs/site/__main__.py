"""Command that makes the documentation: ``python docs/site``.

::

    docstrings ── first sentences ──▶ docs/api.md, the index
        └──────── autodoc ──────────┐
    README.md, CHANGELOG.md, docs/ ─┴─ MyST ──▶ build/site
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The clone's own package, also where another nxdpp is installed.
sys.path.insert(0, str(ROOT))


def main() -> int:
    """Write ``docs/api.md`` and the site; 1 for a warning such as a broken link, or an old index with ``--check``."""
    parser = argparse.ArgumentParser(prog="python docs/site", description="docs/api.md and the site of all pages.")
    parser.add_argument("--output", type=Path, default=ROOT / "build/site", help="folder of the site")
    parser.add_argument("--check", action="store_true", help="leave docs/api.md as it is, and fail if it is old")
    arguments = parser.parse_args()

    from api_index import api_index
    from api_page import SETTINGS, api_page
    from web_site import make_site

    file = ROOT / "docs/api.md"
    index = api_index()
    is_good = True
    if not arguments.check:
        file.write_text(index)
    elif not file.exists() or file.read_text() != index:
        print("docs/api.md is not that of the docstrings: run python docs/site", file=sys.stderr)
        is_good = False
    is_good &= make_site(ROOT, arguments.output, {"docs/api": api_page()}, SETTINGS)
    print(arguments.output / "README.html" if is_good else "the lines above are errors", file=sys.stderr)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
