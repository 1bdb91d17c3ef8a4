"""A rank makes its own experts only: memory of models that are constructed without it."""

from typing import Any

import pytest
import torch

from nxdpp import NxDPPModel, deferred_init, expert_parallelize, init_on_device, parallel_state
from nxdpp.gradients.expert_parameters import is_of_experts
from tests.support.expert_models import mixtral
from tests.support.process_memory import peak_bytes, reset_peak, resident_bytes
from tests.support.run_ranks import run_ranks

# 4 experts of 12 MiB in each of 2 layers.
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 4096}
SLACK_BYTES = 16 * 2**20


def _made(how: str, **sizes: Any) -> NxDPPModel:
    if how == "deferred":
        model = deferred_init(mixtral, 2, **sizes)
    else:
        with init_on_device(torch.device("meta")):
            model = mixtral(2, **sizes)
    wrapped = NxDPPModel(expert_parallelize(model), num_microbatches=2)
    wrapped.move_model_to_device()
    return wrapped


def _memory(rank: int, how: str, experts: int) -> tuple[int, int, int, int]:
    """Return bytes: of this rank's parameters, of its experts, and by which its memory grew at last and at most."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=experts)
    _made(how)
    reset_peak()
    before = resident_bytes()
    wrapped = _made(how, **SIZES)
    parameters = list(wrapped.local_parameters())
    grown, most = resident_bytes() - before, peak_bytes() - before
    return sum(p.nbytes for p in parameters), sum(p.nbytes for p in parameters if is_of_experts(p)), grown, most


@pytest.mark.parametrize("how", ["deferred", "meta"])
def test_a_rank_has_memory_for_its_own_experts(how: str) -> None:
    whole = 2 * 4 * 12 * 2**20
    # The largest parameter is made whole, and the rank's part of it is taken.
    scratch = 4 * 8 * 2**20
    for own, of_experts, grown, most in run_ranks(2, _memory, how, 2):
        assert of_experts == whole // 2
        assert grown < own + SLACK_BYTES
        assert most < own + scratch + SLACK_BYTES
