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


def test_attributes_are_those_of_the_wrapped_module_and_of_this_rank(view: LocalView) -> None:
    assert view.config is view.original_module.config
    assert view.hidden_size() == 4
    assert view.head is view.original_module.head
    assert (view.device, view.dtype) == (torch.device("cpu"), torch.bfloat16)
    with pytest.raises(ValueError, match="the property's own error"):
        view.broken  # noqa: B018


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tail", r"'tail'; the Wrapped that it wraps has one.*local_module\.tail has this rank's part of it"),
        ("first", r"'first'; the Wrapped that it wraps has one.*which another rank holds"),
        ("nothing", "'nothing'$"),
    ],
)
def test_parts_of_other_ranks_are_refused_with_their_place(view: LocalView, name: str, text: str) -> None:
    assert not hasattr(view, name)
    with pytest.raises(AttributeError, match=f"no attribute {text}"):
        getattr(view, name)
