"""Every model type of transformers' auto mappings, as small as it can be built, with inputs that it trains on."""

from benchmarks.zoo_models.inputs import SHAPES, inputs
from benchmarks.zoo_models.special_cases import CANNOT_TRAIN
from benchmarks.zoo_models.tiny_models import TASKS, build, types

__all__ = ["CANNOT_TRAIN", "SHAPES", "TASKS", "build", "inputs", "types"]
