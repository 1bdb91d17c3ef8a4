"""Embedding divided over the tensor-parallel ranks, with the name of NeuronX Distributed.

The initial values are the same as in a whole ``torch.nn.Embedding``, whatever the tensor-parallel size, and so is the
state of the generator afterwards. They are drawn on the CPU.
"""

import math

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional, init

from nxdpp.devices.kinds import device_of
from nxdpp.tensor import mappings
from nxdpp.tensor.initial_parts import InitMethod, fill_parameter
from nxdpp.tensor.parallel_layer import ParallelLayer


class ParallelEmbedding(ParallelLayer):
    """``torch.nn.Embedding`` that is divided over the tensor-parallel ranks by rows, the tokens.

    The rows are padded to a multiple of the tensor-parallel size. Those behind ``num_embeddings`` are zero, and no id
    can reach them.

    The arguments have the order of NeuronX Distributed. Its API guide prints ``init_method``, ``dtype`` and ``device``
    in the places of ``padding_idx``, ``max_norm`` and ``norm_type``: a function in the third place begins that order.

    Args:
        num_embeddings: size of the vocabulary.
        embedding_dim: size ``H`` of an embedding.
        padding_idx: id whose embedding starts as zeros and gets no gradient.
        max_norm, norm_type, scale_grad_by_freq, sparse, shard_across_embedding: ``None``, 2.0 and ``False``.
        init_method: initialises the whole weight ``(num_embeddings, H)`` in place.
        device: of the weight, by default the context's device.
        dtype: of the weight.
        pad: both values pad.
        sequence_parallel_enabled: return this rank's part of the sequence.
        tensor_model_parallel_group: this rank's tensor group.
        sequence_dimension: the dimension of the sequence in the result. Ids are ``(B, S)`` in either case.

    Shape: ids ``(...)`` -> ``(..., H)``. With ``sequence_parallel_enabled`` ids ``(B, S)`` -> ``(S / ranks, B, H)``, as
    in NeuronX Distributed, and ``(B, S / ranks, H)`` with ``sequence_dimension=1``.

    Raises ``ValueError`` for arguments that it does not have.
    """

    _shown = ("num_embeddings", "embedding_dim", "padding_idx")

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | InitMethod | None = None,
        max_norm: float | torch.dtype | None = None,
        norm_type: float | torch.device | str | None = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: InitMethod = init.normal_,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype = torch.float32,
        shard_across_embedding: bool = False,
        pad: bool = False,
        sequence_parallel_enabled: bool = False,
        tensor_model_parallel_group: ProcessGroup | None = None,
        *,
        sequence_dimension: int | None = None,
    ) -> None:
        super().__init__(tensor_model_parallel_group)
        if callable(padding_idx):
            init_method, padding_idx = padding_idx, None
            if isinstance(max_norm, torch.dtype):
                dtype, max_norm = max_norm, None
            if not isinstance(norm_type, float):
                device, norm_type = norm_type, 2.0
        if max_norm is not None or norm_type != 2.0:
            raise ValueError(
                f"max_norm={max_norm} and norm_type={norm_type} are not supported: give dtype and device by name"
            )
        if scale_grad_by_freq or sparse or shard_across_embedding:
            raise ValueError(
                "scale_grad_by_freq=True, sparse=True and shard_across_embedding=True are not supported: a rank does "
                "not count the ids of other ranks, averages and ZeRO-1 take dense gradients, and rows are divided"
            )
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx={padding_idx} is not an id of a vocabulary of {num_embeddings}")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx if padding_idx is None else padding_idx % num_embeddings
        self.num_embeddings_per_partition = rows = math.ceil(num_embeddings / self.tensor_parallel_size)
        self.start_index = self.tensor_parallel_rank * rows
        self.end_index = self.start_index + rows
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self._init_method = init_method
        self.weight: nn.Parameter
        padded = rows * self.tensor_parallel_size
        self._add_part("weight", (num_embeddings, embedding_dim), 0, dtype, device, padded=padded)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weight."""
        self.init_weight_cpu()

    def init_weight_cpu(self) -> None:
        """Initialise the weight from numbers that are drawn on the CPU."""
        fill_parameter(self.weight, self._init_method)
        row = self._own_padding_row()
        if row is not None:
            with torch.no_grad():
                self.weight[row].fill_(0)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the embeddings ``(..., H)`` of the ids ``(...)``, under sequence parallelism this rank's part.

        Raises ``IndexError`` for an id outside. XLA has no such error: the embedding is not-a-number.
        """
        self._check_group()
        if self.tensor_parallel_size == 1:
            return self._with_sequence_first(functional.embedding(input_, self.weight, self.padding_idx))
        elsewhere = (input_ < self.start_index) | (input_ >= self.end_index)
        outside = (input_ < 0) | (input_ >= self.num_embeddings)
        rows = (input_ - self.start_index).masked_fill(elsewhere, 0)
        # An id that no rank has stays outside of the rows: torch's own error follows, on all ranks.
        rows = rows.masked_fill(outside, self.num_embeddings_per_partition)
        parts = functional.embedding(rows, self.weight, self._own_padding_row()).masked_fill(elsewhere[..., None], 0)
        if not device_of(parts.device).refuses_indices:
            parts = parts.masked_fill(outside[..., None], math.nan)
        if self.sequence_parallel_enabled:
            first = self._with_sequence_first(parts)
            return mappings.reduce_scatter_to_sequence_parallel_region(first, self.sequence_dimension)
        return mappings.reduce_from_tensor_model_parallel_region(parts)

    def _with_sequence_first(self, embedded: torch.Tensor) -> torch.Tensor:
        """``(B, S, H)`` as ``(S, B, H)``, if the sequence comes first under sequence parallelism."""
        is_first = self.sequence_parallel_enabled and self.sequence_dimension == 0 and embedded.ndim > 2
        return embedded.transpose(0, 1).contiguous() if is_first else embedded

    def _own_padding_row(self) -> int | None:
        if self.padding_idx is None or not self.start_index <= self.padding_idx < self.end_index:
            return None
        return self.padding_idx - self.start_index
