"""The stages of a model, each with its received values in several microbatches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from tests.support.in_process import InProcessPipeline, stage_arguments


@dataclass
class Stage:
    """``module`` maps constants and received tensors to its outputs; ``batches`` has the received tensors."""

    module: fx.GraphModule
    batches: list[list[torch.Tensor]]
    constants: list[tuple[list[Any], list[Any]]]
    structure: Any

    def run(self, module: Any, values: Sequence[torch.Tensor]) -> Any:
        inputs, placeholders = self.constants[0]
        received = pytree.tree_unflatten(list(values), self.structure)
        return module(*inputs, *received, *placeholders)


def stages_of(model: nn.Module, batches: Sequence[Mapping[str, Any]], count: int) -> Iterator[Stage]:
    """All stages. Constants come from the first batch: all batches must have the same."""
    chain = InProcessPipeline(model, count, batches[0])
    made: list[list[dict[str, Any]]] = [[] for _ in batches]
    for plan, module in zip(chain.plans, chain.modules, strict=True):
        arrived, constants, structure = [], [], None
        for batch, values in zip(batches, made, strict=True):
            inputs, received, placeholders = stage_arguments(plan, batch, values)
            tensors, structure = pytree.tree_flatten(received)
            arrived.append([tensor.detach() for tensor in tensors])
            constants.append((inputs, placeholders))
            with torch.no_grad():
                values.append(dict(zip(plan.made, module(*inputs, *received, *placeholders), strict=True)))
        yield Stage(module, arrived, constants, structure)
