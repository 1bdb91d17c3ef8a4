"""Linear layers and embeddings of a model that become tensor-parallel in place.

The module stays the same object with the same parameter names, and becomes a subclass of its own class. So transformers
initialises it as before, and names in checkpoints do not change::

    nn.Linear     ─▶ ColumnLinear, RowLinear    subclasses of ColumnParallelLinear, RowParallelLinear and nn.Linear
    nn.Embedding  ─▶ VocabularyEmbedding        subclass of ParallelEmbedding and nn.Embedding
    Conv1D        ─▶ ColumnConv1D, RowConv1D    (GPT-2), whose weight is transposed
"""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from nxdpp.ranks import parallel_state
from nxdpp.tensor import mappings
from nxdpp.tensor.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, column_parallel
from nxdpp.tensor.overlapped_linear import WeightRows
from nxdpp.tensor.tensor_attributes import KeepsAttributes

_made: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


class ColumnLinear(ColumnParallelLinear, nn.Linear):  # type: ignore[misc]  # both bases have the parameters
    """``torch.nn.Linear`` whose outputs are divided."""

    # The initial values are drawn for the whole layer: the weight is whole meanwhile.
    reset_parameters = nn.Linear.reset_parameters

    def _product(self, input_: torch.Tensor) -> torch.Tensor:
        siblings = vars(self).get("siblings")
        return super()._product(input_) if siblings is None else siblings.product(self, input_)


class RowLinear(RowParallelLinear, nn.Linear):  # type: ignore[misc]  # both bases have the parameters
    """``torch.nn.Linear`` whose inputs are divided."""

    reset_parameters = nn.Linear.reset_parameters


class RowLinearOfOwnOutputs(RowLinear):
    """``RowLinear`` whose sums are divided again, such as one output for each head."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs ``(..., O / ranks)`` of its inputs ``(..., I / ranks)``."""
        return mappings.scatter_to_tensor_model_parallel_region(super().forward(x))


class VocabularyEmbedding(ParallelEmbedding, nn.Embedding):  # type: ignore[misc]  # both bases have the parameters
    """``torch.nn.Embedding`` whose tokens are divided."""

    reset_parameters = nn.Embedding.reset_parameters


class HiddenEmbedding(KeepsAttributes, nn.Embedding):
    """``torch.nn.Embedding`` whose hidden size is divided; its output is whole."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the embeddings ``(..., H)``."""
        return mappings.gather_from_tensor_model_parallel_region(super().forward(input))


class ColumnConv1D(KeepsAttributes, Conv1D):
    """``Conv1D`` of transformers, a transposed linear layer, whose outputs are divided."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs ``(..., O / ranks)``."""
        (output,) = column_parallel(x, [WeightRows(self.weight.t(), self.bias)])
        return output


class RowConv1D(KeepsAttributes, Conv1D):
    """``Conv1D`` of transformers, a transposed linear layer, whose inputs are divided."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product ``(..., O)`` of this rank's inputs ``(..., I / ranks)``, summed over the ranks."""
        product = torch.matmul(x, self.weight)
        return mappings.reduce_from_tensor_model_parallel_region(product) + self.bias.to(product.dtype)


def to_vocabulary(module: nn.Embedding) -> None:
    """Make ``module`` a ``VocabularyEmbedding``; its weight is still whole."""
    rows = module.num_embeddings // _size()
    start = parallel_state.get_tensor_model_parallel_rank() * rows
    vars(module).update(
        tensor_parallel_size=_size(),
        tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        num_embeddings_per_partition=rows,
        start_index=start,
        end_index=start + rows,
        sequence_parallel_enabled=False,
        sequence_dimension=1,
        _init_method=nn.init.normal_,
    )
    become(module, VocabularyEmbedding)


def become(module: nn.Module, parallel: type[nn.Module]) -> None:
    """Make ``module`` a ``parallel``, behind the methods of its own class if that is not torch's."""
    own = type(module)
    # ``super().forward(...)`` in the methods of ``own`` calls ``parallel``'s.
    module.__class__ = parallel if own in parallel.__mro__ else _joined(own, own, parallel, f"Parallel{own.__name__}")


def override(module: nn.Module, methods: type[nn.Module]) -> None:
    """Put ``methods`` before the methods of the class of ``module``, under the name of the class."""
    own = type(module)
    module.__class__ = _joined(own, methods, own, own.__name__)


def _joined(own: type[nn.Module], first: type[nn.Module], second: type[nn.Module], name: str) -> type[nn.Module]:
    if (first, second) not in _made:
        _made[first, second] = type(name, (first, second), {"__module__": own.__module__})
    return _made[first, second]


def become_linear(module: nn.Linear, parallel: type[nn.Linear], dim: int, stride: int = 1, **options: bool) -> None:
    """Make ``module`` a ``parallel`` with these ``options``; its parameters are still whole."""
    vars(module).update(
        tensor_parallel_size=_size(),
        tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        input_size=module.in_features,
        output_size=module.out_features,
        stride=stride,
        sequence_parallel_enabled=False,
        sequence_dimension=1,
        skip_bias_add=False,
        reduce_dtype=None,
        _bias_follows=False,
        _dim=dim,
        _init_method=None,
        **options,
    )
    become(module, parallel)


def _size() -> int:
    return parallel_state.get_tensor_model_parallel_size()
