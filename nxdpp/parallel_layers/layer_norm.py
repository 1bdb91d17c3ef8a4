"""Import path of NeuronX Distributed: the module is ``nxdpp.tensor.layer_norm``."""

import sys

from nxdpp.tensor import layer_norm
from nxdpp.tensor.layer_norm import *  # noqa: F403  # its public names, for type checkers

sys.modules[__name__] = layer_norm
