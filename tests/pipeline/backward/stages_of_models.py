"""The stages of a model, each with what it receives in each of several microbatches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from nxdpp.pipeline.p2p.layout import layout_of
from nxdpp.pipeline.runtime.stand_in import stand_in
from tests.support.chained_stages import ChainedStages


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
    chain = ChainedStages(model, batches[0], count)
    made: list[list[dict[str, Any]]] = [[] for _ in batches]
    for plan, module in zip(chain.plans, chain.modules, strict=True):
        arrive, constants, structure = [], [], None
        for batch, values in zip(batches, made, strict=True):
            received = [values[maker][name] for name, maker in plan.received.items()]
            stand_ins = [
                stand_in(layout_of(values[maker][name]), torch.device("cpu")) for name, maker in plan.stand_ins.items()
            ]
            inputs = [batch[name] for name in plan.inputs]
            tensors, structure = pytree.tree_flatten(received)
            arrive.append([tensor.detach() for tensor in tensors])
            constants.append((inputs, stand_ins))
            with torch.no_grad():
                values.append(dict(zip(plan.made, module(*inputs, *received, *stand_ins), strict=True)))
        yield Stage(module, arrive, constants, structure)
