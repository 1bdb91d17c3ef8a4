"""Import path of NeuronX Distributed: the module is ``nxdpp.tensor.random``."""

import sys

from nxdpp.tensor import random
from nxdpp.tensor.random import *  # noqa: F403  # its public names, for type checkers

sys.modules[__name__] = random
