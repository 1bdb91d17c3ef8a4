"""Import path of NeuronX Distributed: the module is ``nxdpp.tensor.modules.qkv_linear``."""

import sys

from nxdpp.tensor.modules import qkv_linear
from nxdpp.tensor.modules.qkv_linear import *  # noqa: F403  # its public names, for type checkers

sys.modules[__name__] = qkv_linear
