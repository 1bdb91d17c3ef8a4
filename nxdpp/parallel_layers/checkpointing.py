"""Import path of NeuronX Distributed: the module is ``nxdpp.tensor.checkpointing``."""

import sys

from nxdpp.tensor import checkpointing
from nxdpp.tensor.checkpointing import *  # noqa: F403  # its public names, for type checkers

sys.modules[__name__] = checkpointing
