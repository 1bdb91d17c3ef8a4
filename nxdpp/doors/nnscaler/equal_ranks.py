"""Comparisons of ranks that would otherwise train on differently without an error.

::

                        2 units of 2 ranks: 0 1 | 2 3
    inputs              first call: rank 1 as rank 0, rank 3 as rank 2
    random numbers      first training forward, where a rank draws: the same ranks
    parallel modules    some steps: rank 2 as rank 0, rank 3 as rank 1
    other modules       some steps: all ranks as rank 0
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from nxdpp.agreement.comparison import unequal, verify_same_inputs
from nxdpp.agreement.fingerprint import digest
from nxdpp.agreement.same_values import sample
from nxdpp.doors.nnscaler.nested_values import values_in
from nxdpp.ranks import parallel_state
from nxdpp.ranks.group_values import gather_values

_REMEDY = (
    "give all ranks of a unit the same. DistributedSampler takes num_replicas=runtime_ngpus // plan_ngpus and "
    "rank=rank // plan_ngpus"
)


class EqualCalls:
    """Compares the first calls of a module over a tensor group: the inputs, and the generators if one rank draws.

    A sampler that divides data over these ranks gives wrong numbers. Dropout has one mask on all of them.

    Args:
        has_group: ``False`` for one rank, which has nothing to compare.
        is_pipeline: a pipeline compares gradients, and no generators.
    """

    def __init__(self, has_group: bool, is_pipeline: bool) -> None:
        self._compares_inputs = has_group
        self._compares_draws = has_group and not is_pipeline

    @contextmanager
    def verified(self, inputs: Any, is_training: bool) -> Iterator[None]:
        """Verify the tensors, numbers and texts in ``inputs``, and the draws of the block.

        Collective over the tensor group in the first block, and in the first one of a training.

        Raises ``RuntimeError`` on all ranks of the group for different inputs, and for draws from different states.
        """
        if self._compares_inputs:
            verify_same_inputs(values_in(inputs), "are in one unit", _REMEDY)
            self._compares_inputs = False
        if not self._compares_draws or not is_training:
            yield
            return
        before = _random_state()
        yield
        group = parallel_state.get_tensor_control_group()
        draws = any(gather_values(_random_state() != before, group))
        if draws and (found := unequal(before, group)) is not None:
            raise RuntimeError(
                f"ranks {found.ranks[0]} and {found.ranks[1]} are in one unit and draw other random numbers, such as "
                f"for dropout: call torch.manual_seed with the same seed on all ranks of a unit before the training"
            )
        self._compares_draws = False


def verify_equal_values(
    parallel: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor], plan_ngpus: int, plain_ranks: int = 1
) -> None:
    """Compare a sample of the values of the units, and of the plain parameters; collective over all ranks.

    Args:
        parallel: parameters of the parallel modules of this rank by name.
        plain: parameters outside the parallel modules.
        plan_ngpus: number of ranks of a unit.
        plain_ranks: number of first ranks whose plain parameters may differ.

    Raises ``RuntimeError`` on all ranks if they differ: sums of gradients would keep them apart.
    """
    for tensors, ranks in ((parallel, plan_ngpus), (plain, plain_ranks)):
        samples = {name: sample(tensor).hex() for name, tensor in tensors.items()}
        found = unequal(samples, mates=parallel_state.get_world_group().rank() % ranks)
        if found is not None:
            (there, here), (first, rank) = found.values, found.ranks
            name = next(name for name in {**there, **here} if there.get(name) != here.get(name))
            raise RuntimeError(
                f"{name} has other values on rank {rank} than on rank {first}, and their sums of gradients would keep "
                f"them apart. Load the same values on every rank, or call broadcast_weights(module) before the step"
            )


def _random_state() -> bytes:
    """A hash of the states of the generators of this rank."""
    states = [torch.get_rng_state()]
    device = parallel_state.local_device()
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return b"".join(digest(state.cpu().numpy().data) for state in states)
