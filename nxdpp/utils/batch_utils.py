"""Import path of NeuronX Distributed: the part of a batch of a context-parallel rank."""

from collections.abc import Mapping
from typing import Any

__all__ = ["get_batch_on_this_context_parallel_rank"]


def get_batch_on_this_context_parallel_rank(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``batch``: ranks that share its sequences are given them whole (``nxdpp.context_parallelize``)."""
    return batch
