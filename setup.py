"""Stop a build from a checkout without symbolic links: its packages would lack most of nxdpp."""

import sys
from pathlib import Path

from setuptools import setup

# Git without core.symlinks writes each link as a text file of its target.
texts = sorted(path.name for path in Path(__file__).parent.joinpath("nxdpp").iterdir() if path.is_file())
missing = [name for name in texts if "." not in name]
if missing:
    sys.exit(
        f"nxdpp cannot be built here: nxdpp/{', nxdpp/'.join(missing)} must be symbolic links and are text files. "
        "Clone with `git clone -c core.symlinks=true`, or build from the sdist, which has no links."
    )

setup()
