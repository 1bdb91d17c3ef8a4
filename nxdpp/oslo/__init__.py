"""OSLO's ways in: ``import nxdpp.oslo as oslo``.

``initialize`` is imported at its first use: ``import nxdpp.oslo`` needs neither torch nor transformers.
"""

from types import ModuleType
from typing import TYPE_CHECKING

from nxdpp.late_names import late_names

if TYPE_CHECKING:
    from nxdpp.doors.oslo.initialization import initialize

__all__ = ["initialize"]


def _module_with(name: str) -> ModuleType:
    from nxdpp.doors.oslo import initialization

    return initialization


__getattr__, __dir__ = late_names(__name__, __all__, _module_with)
