"""Every model type of four of transformers' auto mappings, as small as possible, with inputs for training."""

from tests.zoo.inputs import SHAPES, inputs
from tests.zoo.special_cases import ARGUMENTS, CANNOT_TRAIN, NO_GRADIENT_IN_EVAL, NOTES
from tests.zoo.tiny_models import TASKS, build, types

__all__ = ["ARGUMENTS", "CANNOT_TRAIN", "NOTES", "NO_GRADIENT_IN_EVAL", "SHAPES", "TASKS", "build", "inputs", "types"]
