"""Import path of NeuronX Distributed: the module is ``nxdpp.doors.nxd.logger``."""

import sys

from nxdpp.doors.nxd import logger
from nxdpp.doors.nxd.logger import *  # noqa: F403  # its public names, for type checkers

sys.modules[__name__] = logger
