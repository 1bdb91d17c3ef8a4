"""Transformer layers of a model and their costs, for policies that run before any rank holds a part."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import nn

from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.partition.assignment import layers_in_order
from nxdpp.pipeline.partition.layer_costs import layer_costs
from nxdpp.pipeline.partition.partition import even_cuts
from nxdpp.schedules.balance import LayerCost
from nxdpp.tracing.costs.count import count_costs
from nxdpp.tracing.graph.trace import trace_for
from nxdpp.tracing.values.input_dicts import InputDict, open_inputs


class TracedLayers:
    """Transformer layers of a model, in the order of execution.

    Attributes:
        names: of the layers. A cut falls after one of them.
        nodes: of the traced graph, in the order of execution.
    """

    def __init__(
        self,
        module: nn.Module,
        example: Mapping[str, Any],
        transformer_layer_cls: Any | None,
        autowrap_functions: Sequence[Callable[..., Any]] = (),
    ) -> None:
        config = PipelineConfig(module, transformer_layer_cls, autowrap_functions=autowrap_functions)
        options = config.tracing_options()
        self._module = module
        self._example = example
        self._traced = trace_for(module, example, options)
        self.names = tuple(layers_in_order(self._traced, options.layers_of(module)))
        self.nodes = tuple(node.name for node in self._traced.graph.nodes)

    @cached_property
    def costs(self) -> tuple[LayerCost, ...]:
        """Counted cost of each layer for one microbatch, then the cost of the head where it has parameters.

        ``work`` is in FLOPs of the roofline model. ``state_bytes`` count weights, gradients and AdamW's state.
        """
        opened = open_inputs(self._example, all_kinds=True)
        batch = {name: value for name, value in opened.items() if not isinstance(value, InputDict)}
        return tuple(layer_costs(self._traced, self._module, count_costs(self._traced, self._module, batch)))

    def even_cuts(self, stages: int) -> list[str]:
        """Return the layers after which to cut into ``stages`` of even size.

        Raises ``ValueError`` for fewer layers than stages.
        """
        return even_cuts(self.names, stages)


def trace_layers(
    module: nn.Module,
    example: Mapping[str, Any],
    *,
    transformer_layer_cls: Any | None = None,
    autowrap_functions: Sequence[Callable[..., Any]] = (),
) -> TracedLayers:
    """Trace ``module`` and return its transformer layers; needs no ranks, changes and sends nothing.

    Args:
        module: the model, in the training mode of its steps. Its parameters may be on the meta device.
        example: inputs of one microbatch by the names of ``forward``'s arguments, with labels. Dicts may be nested.
            Only shapes and dtypes of tensors are read.
        transformer_layer_cls: class, or name of a class, of the layers, or a list of these. By default as in
            ``NxDPPModel``.
        autowrap_functions: functions that are not traced through.

    Raises:
        TracingError: for a model that cannot be traced.
        ValueError: for a model without layers, and for a layer that runs several times.
    """
    return TracedLayers(module, example, transformer_layer_cls, autowrap_functions)
