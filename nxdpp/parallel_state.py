"""Import path of the API guide of NeuronX Distributed: the module is ``nxdpp.parallel_layers.parallel_state``."""

import sys

from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.parallel_state import *  # noqa: F403  # its public names, for type checkers

sys.modules[__name__] = parallel_state
