"""Tensors that all replicas have, divided among them by bytes."""

from collections.abc import Mapping

from nxdpp.checkpoint.distributed.tensor_blocks import TensorBlocks


def owners(tensors: Mapping[str, TensorBlocks], replicas: int) -> dict[str, int]:
    """Return the replica that writes or reads each of ``tensors``: each has about as many bytes."""
    filled = [0] * replicas
    found = {}
    for name, blocks in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        found[name] = filled.index(min(filled))
        filled[found[name]] += blocks.nbytes
    return found
