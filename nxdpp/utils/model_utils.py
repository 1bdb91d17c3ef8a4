"""Import path of NeuronX Distributed for functions that build and move models."""

from nxdpp.initialization.deferred_init import deferred_init
from nxdpp.initialization.init_on_device import init_on_device
from nxdpp.tensor.move_model_to_device import move_model_to_device

__all__ = ["deferred_init", "init_on_device", "move_model_to_device"]
