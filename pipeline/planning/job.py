"""The job of a plan: the samples of a step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Job:
    """Samples of a step.

    Attributes:
        global_batch: number of samples of a step, all replicas together.
        inputs: a function of a number of samples ``B`` that returns the inputs of a microbatch with labels, by name.
            Tensors may be on the meta device; ``B`` is their first dimension.

    Raises ``ValueError`` for a batch below 1.
    """

    global_batch: int
    inputs: Callable[[int], Mapping[str, Any]]

    def __post_init__(self) -> None:
        if isinstance(self.global_batch, bool) or not isinstance(self.global_batch, int) or self.global_batch < 1:
            raise ValueError(f"global_batch={self.global_batch!r} must be a whole number of at least 1.")
