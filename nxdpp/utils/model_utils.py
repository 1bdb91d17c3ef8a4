"""Import path of the pipeline guide for the functions of ``nxdpp.initialization``."""

from nxdpp.initialization.deferred_init import deferred_init
from nxdpp.initialization.init_on_device import init_on_device

__all__ = ["deferred_init", "init_on_device"]
