"""Layer norm whose parameters are marked for sequence parallelism, with the name of NeuronX Distributed."""

from typing import Any

from torch import nn

from nxdpp.tensor.tensor_attributes import KeepsAttributes, mark_sequence_parallel


class LayerNorm(KeepsAttributes, nn.LayerNorm):
    """``torch.nn.LayerNorm`` with the argument ``sequence_parallel_enabled``.

    With it the gradients of its parameters are summed over the tensor-parallel ranks, see ``sequence_parallel``.
    """

    def __init__(self, *args: Any, sequence_parallel_enabled: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        if sequence_parallel_enabled:
            mark_sequence_parallel(self)
