"""Attributes that users ask of a pipelined model as of the module that it wraps."""

import pytest
from torch import nn

from nxdpp.pipeline.local.view import LocalView


class Wrapped(nn.Module):
    """A module with the attributes of a Hugging Face model."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"hidden_size": 4}
        self.head = nn.Linear(2, 2)

    @property
    def dtype(self) -> str:
        raise ValueError("a property is not evaluated")

    def save_pretrained(self, directory: str) -> None:
        raise AssertionError

    def gradient_checkpointing_enable(self) -> None:
        raise AssertionError


@pytest.fixture
def view() -> LocalView:
    made = LocalView()
    made.local_module = nn.Module()
    made.local_module.head = nn.Linear(2, 2)
    made.__dict__["original_module"] = Wrapped()
    return made


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("config", r"Read original_module\.config\."),
        ("dtype", r"Read original_module\.dtype\."),
        ("head", r"local_module\.head has this rank's part of it"),
        ("save_pretrained", r"nxdpp\.save_pretrained\(model, directory\)"),
        ("gradient_checkpointing_enable", "Call gradient_checkpointing_enable before the module is wrapped"),
    ],
)
def test_an_attribute_of_the_wrapped_module_is_named_with_its_place(view: LocalView, name: str, place: str) -> None:
    assert not hasattr(view, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; the Wrapped that it wraps has one.*{place}"):
        getattr(view, name)


def test_the_places_have_the_attributes(view: LocalView) -> None:
    assert view.original_module.config == {"hidden_size": 4}
    assert isinstance(view.local_module.head, nn.Linear)


@pytest.mark.parametrize("name", ["nothing", "_private"])
def test_an_attribute_of_neither_is_missing_as_always(view: LocalView, name: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'$"):
        getattr(view, name)
