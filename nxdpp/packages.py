"""Public packages of nxdpp, which imports this module at the first use of one that no statement has imported."""

from nxdpp import integrations as integrations
from nxdpp import kernels as kernels
from nxdpp import modules as modules
from nxdpp import nnscaler as nnscaler
from nxdpp import optimizer as optimizer
from nxdpp import oslo as oslo
from nxdpp import overrides as overrides
from nxdpp import parallel_layers as parallel_layers
from nxdpp import pipeline as pipeline
from nxdpp import schedules as schedules
from nxdpp import scripts as scripts
from nxdpp import trainer as trainer
from nxdpp import utils as utils
