"""Conversions of a rank's tree that replace parameters."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from nxdpp.pipeline.local.local_module import LocalModule


@pytest.fixture
def _replacing() -> Iterator[None]:
    """Make torch replace parameters in conversions, as it does between the CPU and XLA devices."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def _tree() -> LocalModule:
    tree = LocalModule()
    tree.add_module("embed", nn.Embedding(4, 2))
    tree.add_module("head", nn.Linear(2, 4, bias=False))
    tree.head.weight = tree.embed.weight  # type: ignore[union-attr]  # modules of the lines before
    tree.head.weight.of_a_user = "kept"  # type: ignore[union-attr]  # an attribute of a program
    return tree


@pytest.mark.usefixtures("_replacing")
def test_replaced_parameters_keep_ties_and_attributes() -> None:
    tree = _tree()
    before = next(tree.parameters())
    tree.double()
    (after,) = tree.parameters()
    assert after is not before
    assert (after.dtype, vars(after)["of_a_user"]) == (torch.float64, "kept")


@pytest.mark.usefixtures("_replacing")
def test_an_optimizer_of_replaced_parameters_is_refused_before_anything_changes() -> None:
    tree = _tree()
    optimizer = torch.optim.SGD(tree.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="SGD, holds 1 of the 1 parameter"):
        tree.double()
    assert [parameter.dtype for parameter in tree.parameters()] == [torch.float32]
    del optimizer
    tree.double()
