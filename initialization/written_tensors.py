"""The tensors that a dispatched operation writes to."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def written_tensors(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensor arguments that ``function``, an operator overload, changes according to its schema."""
    if not function._schema.is_mutable:
        return []
    written: list[torch.Tensor] = []
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = arguments[place] if place < len(arguments) else keywords.get(argument.name)
        written += [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    return written
