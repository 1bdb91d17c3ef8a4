"""nnScaler's ways in: ``import nxdpp.nnscaler as nnscaler``."""

from nxdpp.nnscaler import parallel as parallel
from nxdpp.nnscaler import runtime as runtime
from nxdpp.nnscaler.parallel import *  # its public names


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
