"""Import path of NeuronX Distributed: the module is ``nxdpp.tensor.pad``."""

import sys

from nxdpp.tensor import pad
from nxdpp.tensor.pad import *  # noqa: F403  # its public names, for type checkers

sys.modules[__name__] = pad
