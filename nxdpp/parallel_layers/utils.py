"""Import path of NeuronX Distributed: the module is ``nxdpp.tensor.utils``."""

import sys

from nxdpp.tensor import utils
from nxdpp.tensor.utils import *  # noqa: F403  # its public names, for type checkers

sys.modules[__name__] = utils
