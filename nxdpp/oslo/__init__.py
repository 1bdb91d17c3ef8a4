"""OSLO's ways in: ``import nxdpp.oslo as oslo``."""

from nxdpp.doors.oslo.initialization import initialize

__all__ = ["initialize"]


def __dir__() -> list[str]:
    return __all__
