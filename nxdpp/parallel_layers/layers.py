"""Import path of NeuronX Distributed: the module is ``nxdpp.tensor.layers``."""

import sys

from nxdpp.tensor import layers
from nxdpp.tensor.layers import *  # noqa: F403  # its public names, for type checkers

sys.modules[__name__] = layers
