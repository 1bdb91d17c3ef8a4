"""Smallest programs that use the private names of torch as nxdpp does; each returns whether the name works."""

from collections.abc import Callable

from torch import nn

from nxdpp.ground import torch_names as names
from nxdpp.ground.names import PrivateName


def _parameters() -> bool:
    layer = nn.Linear(1, 1, bias=False)
    return list(names.PARAMETERS.of(layer).items()) == [("weight", layer.weight), ("bias", None)]


PROBES: dict[PrivateName, Callable[[], bool]] = {
    names.PARAMETERS: _parameters,
}
