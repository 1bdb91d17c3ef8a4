"""Optimizer of a subclass's ``create_optimizer``, which may be made over the whole model after it is cut.

::

    groups of the subclass    [a, b]  [c, d]      b and c are parameters of other ranks, on the meta device
    groups afterwards         [a]     [d]
"""

from typing import Any

from torch import nn


def keep_own_parameters(optimizer: Any, model: nn.Module) -> None:
    """Remove the parameters of ``model`` that other ranks have from the groups of ``optimizer``; not collective.

    Empty groups stay. An ``optimizer`` without groups is left as it is.
    """
    others = {id(parameter) for parameter in model.parameters() if parameter.is_meta}
    for group in getattr(optimizer, "param_groups", []):
        before = list(group["params"])
        # Another object may have the same list: torch's LBFGS has.
        group["params"][:] = [each for each in before if id(each) not in others]
        if "param_names" in group:
            pairs = zip(group["param_names"], before, strict=True)
            group["param_names"][:] = [name for name, each in pairs if id(each) not in others]
        for each in before:
            if id(each) in others:
                optimizer.state.pop(each, None)
