"""Packages of a build: those below nxdpp/, of which three are folders at the top that nxdpp/ links to."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
# Git without core.symlinks, and programs that unpack a zip, write a link as a text file: the folder is then named here.
unlinked = [name for name in ("pipeline", "schedules", "tracing") if not (ROOT / "nxdpp" / name).is_dir()]

packages = find_packages(str(ROOT), include=["nxdpp", "nxdpp.*"])
for name in unlinked:
    packages += [f"nxdpp.{name}", *(f"nxdpp.{name}.{each}" for each in find_packages(str(ROOT / name)))]

setup(packages=packages, package_dir={f"nxdpp.{name}": name for name in unlinked})
