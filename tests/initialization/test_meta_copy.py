"""A copy on the meta device keeps classes and ties and does not change the original."""

from torch import nn

from nxdpp.initialization.meta_copy import meta_copy
from nxdpp.pipeline.local.replaced_modules import copy_modes


def test_classes_and_ties_are_those_of_the_original() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    copied = meta_copy(model)
    assert [type(module) for module in copied.modules()] == [type(module) for module in model.modules()]
    assert all(tensor.is_meta for tensor in [*copied.parameters(), *copied.buffers()])
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert copied[1].weight is copied[0].weight  # type: ignore[index]
    copied.eval()
    assert all(module.training for module in model.modules())


def test_modes_are_taken_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    copied = meta_copy(model)
    model[0].requires_grad_(False)
    model[1] = nn.Linear(2, 2).eval()
    copy_modes(model, copied)
    assert {name: parameter.requires_grad for name, parameter in copied.named_parameters()} == {
        "0.weight": False,
        "0.bias": False,
        "1.0.weight": True,
        "1.0.bias": True,
    }
    assert {name: module.training for name, module in copied.named_modules()} == {
        "": True,
        "0": True,
        "1": False,
        "1.0": True,
    }
