"""Models of other libraries, a list of cases for each."""

import importlib

from tools.zoo.libraries.case import Case

# The module that is imported, and the file with its cases.
LIBRARIES = {
    "torch": "torch_models",
    "timm": "timm_models",
    "torchvision": "torchvision_models",
    "vit_pytorch": "vit_pytorch_models",
    "diffusers": "diffusers_models",
    "peft": "peft_models",
    "x_transformers": "x_transformers_models",
    "open_clip": "open_clip_models",
    "litgpt": "litgpt_models",
}
# The names in the package registry of those that are not torch.
DISTRIBUTIONS = {
    "timm": "timm",
    "torchvision": "torchvision",
    "vit_pytorch": "vit-pytorch",
    "diffusers": "diffusers",
    "peft": "peft",
    "x_transformers": "x-transformers",
    "open_clip": "open_clip_torch",
    "litgpt": "litgpt",
}


def is_installed(library: str) -> bool:
    """Return whether ``library`` can be imported, with what it needs."""
    try:
        importlib.import_module(library)
    except ImportError:
        return False
    return True


def cases(library: str) -> dict[str, Case]:
    """The cases of one of ``LIBRARIES``."""
    found: dict[str, Case] = importlib.import_module(f"tools.zoo.libraries.{LIBRARIES[library]}").CASES
    return found
