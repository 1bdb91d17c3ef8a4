"""A jump leaves torch's generator in the same state as the draws."""

import pytest
import torch

from nxdpp.initialization.mersenne_twister import jump


@pytest.mark.parametrize("before", [0, 623, 624])
@pytest.mark.parametrize("draws", [0, 1, 624, 625, 32 * 624, 1_000_007])
def test_a_jump_equals_the_draws(before: int, draws: int) -> None:
    jumped, drawn = (torch.Generator().manual_seed(5) for _ in range(2))
    for generator in (jumped, drawn):
        torch.empty(before).uniform_(generator=generator)
        torch.empty(1).normal_(generator=generator)  # the second number of the pair stays in the state
    jump(jumped, draws)
    torch.empty(draws).uniform_(generator=drawn)
    assert torch.equal(jumped.get_state(), drawn.get_state())


def test_two_long_jumps_equal_one() -> None:
    once, twice = (torch.Generator().manual_seed(5) for _ in range(2))
    jump(once, 10**12 + 10**11)
    jump(twice, 10**12)
    jump(twice, 10**11)
    assert torch.equal(once.get_state(), twice.get_state())
