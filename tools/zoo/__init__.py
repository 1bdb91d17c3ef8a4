"""Every model type of transformers' auto mappings with a head, as small as possible, with inputs for training."""

# ruff: noqa: E402
from tests.support.torchvision_operators import define_missing_operators

# Before transformers, which imports torchvision if it is installed.
define_missing_operators()

from tools.zoo.inputs import SHAPES, inputs
from tools.zoo.special_cases import ARGUMENTS, CANNOT_TRAIN, NO_GRADIENT_IN_EVAL, NOTES
from tools.zoo.tasks import TASKS
from tools.zoo.tiny_models import build, types

__all__ = ["ARGUMENTS", "CANNOT_TRAIN", "NOTES", "NO_GRADIENT_IN_EVAL", "SHAPES", "TASKS", "build", "inputs", "types"]
