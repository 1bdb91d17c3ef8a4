"""Every model type of transformers' auto mappings, as small as it can be built, with inputs that it trains on."""

from benchmarks.zoo_models.inputs import SHAPES, inputs
from benchmarks.zoo_models.special_cases import ARGUMENTS, CANNOT_TRAIN, NO_GRADIENT_IN_EVAL, NOTES
from benchmarks.zoo_models.tiny_models import TASKS, build, types

__all__ = ["ARGUMENTS", "CANNOT_TRAIN", "NOTES", "NO_GRADIENT_IN_EVAL", "SHAPES", "TASKS", "build", "inputs", "types"]
