"""A model as a list of layers that the caller cuts, NeuronX Distributed's ``manual_pp_partition``.

::

    layers    [embedding, block, block, head]        the first gets [inputs], each other one the output before
    stages    manual_pp_stage_partition_fn(layers, 2) ─▶ {embedding: 0, block: 0, block: 1, head: 1}
    loss      manual_pp_loss_fn(output, labels)      of the first value of the last layer's output
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from nxdpp.counted import counted
from nxdpp.ranks import parallel_state

StageOfLayers = Callable[[list[nn.Module], int], dict[nn.Module, int]]
"""A function of the layers and the number of stages, which returns the stage of each layer."""


class PipelineStageModule(nn.Module):
    """The layers of a model in a row, as ``layers.0``, ``layers.1`` and so on.

    Args:
        layers: modules, in the order in which they run.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: Any) -> Any:
        """Run all layers; the first gets a list with the inputs, as NxD's first stage."""
        output: Any = [inputs]
        for layer in self.layers:
            output = layer(output)
        return output

    @staticmethod
    def mark_weight_sharing(
        layer_and_weight_path: Sequence[tuple[nn.Module, str]], sharing_group_name: str = "default"
    ) -> None:
        """Make the weights of several layers one parameter, the first of them.

        Args:
            layer_and_weight_path: each layer with the path of its weight, such as ``(head, "weight")``.
            sharing_group_name: a name for messages; any number of groups may have it.

        Raises ``ValueError`` for weights of different shapes, before anything is changed.
        """
        weights = [operator.attrgetter(path)(layer) for layer, path in layer_and_weight_path]
        shapes = {tuple(weight.shape) for weight in weights}
        if len(shapes) > 1:
            raise ValueError(
                f"the weights of {sharing_group_name!r} have the shapes {sorted(shapes)}: share equal ones."
            )
        for layer, path in layer_and_weight_path[1:]:
            owner, _, name = path.rpartition(".")
            setattr(operator.attrgetter(owner)(layer) if owner else layer, name, weights[0])


def manual_model(
    layers: Any, chunks: int, partition_fn: StageOfLayers | None, loss_fn: Callable[[Any, Any], Any] | None
) -> tuple[PipelineStageModule, list[type[nn.Module]], list[str], Callable[[Any, Any], Any] | None]:
    """Return the model of ``layers``, cut into ``chunks`` stages per rank: module, classes of layers, cuts and loss.

    Without ``partition_fn`` all stages have as many layers, and the last one has the remainder too.

    Raises ``TypeError`` unless ``layers`` are a list of modules, and ``ValueError`` for layers without a stage and for
    stages that are empty or not in the order of the layers.
    """
    if not isinstance(layers, list | tuple) or not all(isinstance(layer, nn.Module) for layer in layers):
        raise TypeError("manual_pp_partition=True takes a list of layers: NxDPPModel([embedding, *blocks, head], ...).")
    module = PipelineStageModule(layers)
    stages = parallel_state.get_pipeline_model_parallel_size() * chunks
    if partition_fn is None:
        size = max(len(layers) // stages, 1)
        found = [min(number // size, stages - 1) for number in range(len(layers))]
    else:
        of_layer = partition_fn(list(layers), stages)
        missing = [number for number, layer in enumerate(layers) if layer not in of_layer]
        if missing:
            raise ValueError(f"manual_pp_stage_partition_fn returns no stage of layers {missing} of {len(layers)}.")
        found = [of_layer[layer] for layer in layers]
    if found != sorted(found) or set(found) != set(range(stages)):
        raise ValueError(
            f"the stages of the {counted(len(layers), 'layer')} are {found}, and {stages} stages are needed, each with "
            "layers that follow each other. manual_pp_stage_partition_fn(layers, num_stages) returns the stage of "
            "each layer."
        )
    cuts = [f"layers.{number}" for number in range(len(layers) - 1) if found[number] < found[number + 1]]
    classes = list(dict.fromkeys(type(layer) for layer in layers))
    return module, classes, cuts, None if loss_fn is None else _of_first_value(loss_fn)


def _of_first_value(loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return ``loss_fn`` of the first value of an output that is a list, and of ``labels``."""

    def loss(output: Any, labels: Any) -> Any:
        return loss_fn(output[0] if isinstance(output, list | tuple) else output, labels)

    return loss
