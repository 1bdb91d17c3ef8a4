"""A copy on the meta device keeps classes and ties and does not change the original."""

from torch import nn

from nxdpp.initialization.meta_copy import meta_copy


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
