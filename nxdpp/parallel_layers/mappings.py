"""Import path of NeuronX Distributed: the module is ``nxdpp.tensor.mappings``."""

import sys

from nxdpp.tensor import mappings
from nxdpp.tensor.mappings import *  # noqa: F403  # its public names, for type checkers

sys.modules[__name__] = mappings
