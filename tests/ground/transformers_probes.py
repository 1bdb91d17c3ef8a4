"""Smallest programs that use the private names of transformers as nxdpp does; each returns whether the name works."""

from collections.abc import Callable

from nxdpp.ground.names import PrivateName

PROBES: dict[PrivateName, Callable[[], bool]] = {}
