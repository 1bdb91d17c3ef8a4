"""Comparison of the parameters of all ranks: sums of gradients keep other values apart.

::

                        2 units of 2 ranks: 0 1 | 2 3
    parallel modules    rank 2 as rank 0, rank 3 as rank 1
    other modules       all ranks as rank 0
"""

import hashlib
from collections.abc import Mapping

import torch

from nxdpp import parallel_state

_ELEMENTS = 1024  # of a parameter: enough to notice another seed or another checkpoint


def verify_equal_values(
    parallel: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor], plan_ngpus: int, plain_ranks: int = 1
) -> None:
    """Compare a sample of the values of the units, and of the plain parameters; collective over all ranks.

    Args:
        parallel: parameters of the parallel modules of this rank by name.
        plain: those outside of them.
        plan_ngpus: number of ranks of a unit.
        plain_ranks: number of first ranks whose plain parameters may differ.

    Raises ``RuntimeError`` on all ranks where they differ.
    """
    kinds = (_digests(parallel), _digests(plain))
    texts = [repr(kind).encode() for kind in kinds]
    everyones = parallel_state.get_exchange().gather([hashlib.blake2b(text).digest() for text in texts])
    for index, size in enumerate((plan_ngpus, plain_ranks)):
        for rank, theirs in enumerate(everyones):
            if theirs[index] != everyones[rank % size][index]:
                _refuse(kinds[index], rank % size, rank)


def _refuse(own: Mapping[str, str], first: int, rank: int) -> None:
    """Raise ``RuntimeError`` with the parameter that differs; collective over all ranks."""
    everyones = parallel_state.get_exchange().gather(own)
    there, here = everyones[first], everyones[rank]
    name = next(name for name in {**there, **here} if there.get(name) != here.get(name))
    raise RuntimeError(
        f"{name} has other values on rank {rank} than on rank {first}, and their sums of gradients would keep them "
        f"apart. Load the same values on every rank, or call broadcast_weights(module) before the step"
    )


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: _digest(tensor.detach()) for name, tensor in tensors.items()}


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.reshape(-1)
    few = flat[:: max(1, flat.numel() // _ELEMENTS)].cpu().contiguous()
    return hashlib.blake2b(few.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
