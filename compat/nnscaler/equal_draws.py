"""Comparison of the random numbers of tensor-parallel ranks: dropout has one mask on all of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from nxdpp import parallel_state


class EqualDraws:
    """Compares, in the first training forward, the generators of a tensor group if one of its ranks draws from them.

    Args:
        is_needed: ``False`` for one rank, and for a pipeline, which compares gradients.
    """

    def __init__(self, is_needed: bool) -> None:
        self._is_needed = is_needed

    @contextmanager
    def verified(self, is_training: bool) -> Iterator[None]:
        """Verify the draws of the block; collective over the tensor group in the first block of a training.

        Raises ``RuntimeError`` on all ranks of the group for draws from other states.
        """
        if not self._is_needed or not is_training:
            yield
            return
        before = _state()
        yield
        group = parallel_state.get_tensor_control_group()
        everyones = [(before, False)] * dist.get_world_size(group)
        dist.all_gather_object(everyones, (before, _state() != before), group=group)
        if any(draws for _, draws in everyones):
            _check_equal([state for state, _ in everyones], dist.get_process_group_ranks(group))
        self._is_needed = False


def _check_equal(states: list[bytes], ranks: list[int]) -> None:
    for rank, state in zip(ranks, states, strict=True):
        if state != states[0]:
            raise RuntimeError(
                f"ranks {ranks[0]} and {rank} are in one unit and draw other random numbers, such as for dropout: call "
                f"torch.manual_seed with the same seed on all ranks of a unit before the training"
            )


def _state() -> bytes:
    """The states of the generators of this rank."""
    state: bytes = torch.get_rng_state().numpy().tobytes()
    device = parallel_state.local_device()
    if device.type == "cpu":
        return state
    own: bytes = torch.get_device_module(device).get_rng_state(device).cpu().numpy().tobytes()
    return state + own
