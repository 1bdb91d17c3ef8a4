"""The stages of a model, each with what it receives in each of several microbatches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from tests.support.in_process import InProcessPipeline, stage_arguments


@dataclass
class Stage:
    """``module`` maps constants and the tensors that arrive to its outputs; ``batches`` are what arrives."""

    module: fx.GraphModule
    batches: list[list[torch.Tensor]]
    constants: list[tuple[list[Any], list[Any]]]
    structure: Any

    def run(self, module: Any, values: Sequence[torch.Tensor]) -> Any:
        inputs, stand_ins = self.constants[0]
        received = pytree.tree_unflatten(list(values), self.structure)
        return module(*inputs, *received, *stand_ins)


def stages_of(model: nn.Module, batches: Sequence[Mapping[str, Any]], count: int) -> Iterator[Stage]:
    """All stages; what is constant comes from the first batch, so all must share it."""
    chain = InProcessPipeline(model, count, batches[0])
    made: list[list[dict[str, Any]]] = [[] for _ in batches]
    for plan, module in zip(chain.plans, chain.modules, strict=True):
        arrive, constants, structure = [], [], None
        for batch, values in zip(batches, made, strict=True):
            inputs, received, placeholders = stage_arguments(plan, batch, values)
            tensors, structure = pytree.tree_flatten(received)
            arrive.append([tensor.detach() for tensor in tensors])
            constants.append((inputs, placeholders))
            with torch.no_grad():
                values.append(dict(zip(plan.made, module(*inputs, *received, *placeholders), strict=True)))
        yield Stage(module, arrive, constants, structure)
