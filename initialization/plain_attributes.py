"""Tensors that are attributes of modules and neither parameters nor buffers: nobody would make them later."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from nxdpp.initialization.recorder import ConstructorRecorder


def materialise_plain_attributes(root: nn.Module, recorder: ConstructorRecorder) -> None:
    """Make the plain tensor attributes of ``root`` and its parts that ``recorder`` deferred.

    Those that lie in a parameter's or buffer's storage are left, and those that require a gradient: they are
    computed in each forward pass.
    """
    registered = [*root.parameters(), *root.buffers()]
    shared = {recorder.tape.number_of(tensor) for tensor in registered if recorder.knows(tensor)}
    made: dict[int, torch.Tensor] = {}

    def is_plain(leaf: Any) -> bool:
        return (
            isinstance(leaf, torch.Tensor)
            and recorder.knows(leaf)
            and not leaf.requires_grad
            and recorder.tape.number_of(leaf) not in shared
        )

    def with_value(leaf: Any) -> Any:
        if not is_plain(leaf):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = recorder.value(leaf)
        return made[id(leaf)]

    for module in root.modules():
        for name, attribute in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules") and any(map(is_plain, tree_leaves(attribute))):
                vars(module)[name] = tree_map(with_value, attribute)
