"""Sizes of tensor, data and ZeRO-1 parallelism around a pipeline. No torch is imported here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Dimensions:
    """Sizes beside that of the pipeline.

    Attributes:
        tensor: number of ranks that share each layer.
        data: number of replicas.
        zero1: the replicas share the optimizer state.
        sequence: the tensor group divides the sequence between its linear layers (sequence parallelism).

    Raises ``ValueError`` for a sequence that one rank would divide.
    """

    tensor: int = 1
    data: int = 1
    zero1: bool = False
    sequence: bool = False

    def __post_init__(self) -> None:
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "sequence parallelism divides the sequence over the ranks of a tensor group, and the tensor-parallel "
                "size is 1: add --tensor-parallel-size, or leave --sequence-parallel out."
            )

    @property
    def sharded_over(self) -> int | None:
        """Number of replicas that share the optimizer state; ``None`` where each has all of it."""
        return self.data if self.zero1 else None

    def check_length(self, inputs: "Mapping[str, torch.Tensor]") -> None:
        """Raise ``ValueError`` for tokens ``(B, T)`` whose length the tensor group cannot divide."""
        tokens = inputs.get("input_ids")
        if self.sequence and tokens is not None and tokens.shape[1] % self.tensor:
            raise ValueError(
                f"a sequence of {tokens.shape[1]} tokens does not divide over {self.tensor} tensor-parallel ranks: "
                f"give --seq-length a multiple of {self.tensor}, or leave --sequence-parallel out."
            )
