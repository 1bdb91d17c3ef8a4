"""nnScaler's ways in: ``import nxdpp.nnscaler as nnscaler``."""

from nxdpp.nnscaler import parallel as parallel
from nxdpp.nnscaler import runtime as runtime
from nxdpp.nnscaler.parallel import *

__all__ = sorted(name for name in vars(parallel) if not name.startswith("_"))


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
