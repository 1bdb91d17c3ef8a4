"""Methods and attributes that ``initialize`` adds to a model, which stays the same object."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from nxdpp.oslo.mpu import MPU

_made: dict[type[nn.Module], type[nn.Module]] = {}


class ParallelModel:
    """A model of transformers that ``initialize`` has divided over ranks.

    Its class is a subclass of this one and of the model's own class, with the name of the own class.

    Attributes:
        mpu: groups, ranks and sizes.
    """

    mpu: MPU


def is_parallel(model: PreTrainedModel) -> bool:
    """Return whether ``model`` was given to ``initialize``."""
    return "mpu" in vars(model)


def make_parallel(model: PreTrainedModel, mpu: MPU) -> None:
    """Make ``model`` a ``ParallelModel``."""
    vars(model)["mpu"] = mpu
    model.__class__ = _parallel_class(type(model))


def _parallel_class(own: type[Any]) -> type[Any]:
    if issubclass(own, ParallelModel):
        return own
    if own not in _made:
        _made[own] = type(own.__name__, (ParallelModel, own), {"__module__": own.__module__, "__doc__": own.__doc__})
    return _made[own]
