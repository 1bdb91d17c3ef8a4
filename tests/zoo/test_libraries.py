"""Models of other libraries, a few of each that is installed; ``python -m tools.zoo training`` compares all."""

import pytest

from tools.zoo import libraries_sweep
from tools.zoo.libraries import LIBRARIES, is_installed
from tools.zoo.sweep import judge_quietly

CHOSEN = [
    ("torch", "nanoGPT"),
    ("timm", "vit"),
    ("torchvision", "resnet18"),
    ("vit_pytorch", "SimpleViT"),
    ("diffusers", "Flux"),
    ("peft", "LoRA"),
    ("x_transformers", "rotary"),
    ("open_clip", "CLIP"),
    ("litgpt", "Llama 3"),
]


def test_a_case_of_each_library() -> None:
    assert {library for library, _ in CHOSEN} == set(LIBRARIES)


@pytest.mark.parametrize(("library", "name"), CHOSEN)
def test_a_model_is_right(library: str, name: str) -> None:
    if not is_installed(library):
        pytest.skip(f"{library} is not installed")

    assert judge_quietly(libraries_sweep.judge, library, name).result in ("exact", "to rounding")
