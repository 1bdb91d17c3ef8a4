"""Import path of NeuronX Distributed: the module is ``nxdpp.tensor.loss_functions``."""

import sys

from nxdpp.tensor import loss_functions
from nxdpp.tensor.loss_functions import *  # noqa: F403  # its public names, for type checkers

sys.modules[__name__] = loss_functions
