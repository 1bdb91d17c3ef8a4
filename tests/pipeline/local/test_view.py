"""Attributes that users ask of a pipelined model as of the module that it wraps."""

import pytest
import torch
from torch import nn

from nxdpp.pipeline.local.local_module import LocalModule
from nxdpp.pipeline.local.view import LocalView


class Wrapped(nn.Module):
    """A module with the attributes of a Hugging Face model; ``tail`` is on another rank."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"hidden_size": 4}
        self.first = nn.Parameter(torch.empty(2, device="meta"))
        self.head = nn.Linear(2, 2, dtype=torch.bfloat16)
        self.tail = nn.Linear(2, 2, device="meta")

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    @property
    def device(self) -> torch.device:
        return self.first.device

    @property
    def broken(self) -> str:
        raise ValueError("the property's own error")

    def hidden_size(self) -> int:
        return self.config["hidden_size"]


@pytest.fixture
def view() -> LocalView:
    made, wrapped = LocalView(), Wrapped()
    made.local_module = LocalModule()
    made.local_module.head = wrapped.head
    made.__dict__["original_module"] = wrapped
    return made


def test_attributes_and_methods_are_those_of_the_wrapped_module(view: LocalView) -> None:
    assert view.config is view.original_module.config
    assert view.hidden_size() == 4
    assert view.head is view.original_module.head


def test_device_and_dtype_are_those_of_this_rank(view: LocalView) -> None:
    assert view.device == torch.device("cpu")
    assert view.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("name", "place"),
    [("tail", r"local_module\.tail has this rank's part of it"), ("first", r"which another rank holds")],
)
def test_parts_of_other_ranks_are_refused_with_their_place(view: LocalView, name: str, place: str) -> None:
    assert not hasattr(view, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; the Wrapped that it wraps has one.*{place}"):
        getattr(view, name)


@pytest.mark.parametrize("name", ["nothing", "_private"])
def test_an_attribute_of_neither_is_missing_as_always(view: LocalView, name: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'$"):
        getattr(view, name)


def test_an_error_of_a_property_is_its_own(view: LocalView) -> None:
    with pytest.raises(ValueError, match="the property's own error"):
        view.broken  # noqa: B018
