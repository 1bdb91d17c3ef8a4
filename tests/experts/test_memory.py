"""A rank makes its own experts only: memory of models that are constructed without it."""

from typing import Any

import pytest
import torch

from nxdpp import NxDPPModel, deferred_init, expert_parallelize, init_on_device, parallel_state
from nxdpp.gradients.expert_parameters import is_of_experts
from tests.support.expert_models import mixtral
from tests.support.process_memory import peak_bytes, reset_peak, resident_bytes
from tests.support.run_ranks import run_ranks

# 4 experts of 24 MiB in each layer. The C library returns the memory of a parameter of 32 MiB or more at once.
LAYERS, SIZES = 4, {"hidden_size": 256, "intermediate_size": 8192}
EXPERTS_BYTES = LAYERS * 4 * 24 * 2**20


def _made(how: str, layers: int, **sizes: Any) -> NxDPPModel:
    if how == "deferred":
        model = deferred_init(mixtral, layers, **sizes)
    else:
        with init_on_device(torch.device("meta")):
            model = mixtral(layers, **sizes)
    wrapped = NxDPPModel(expert_parallelize(model), num_microbatches=2)
    wrapped.move_model_to_device()
    return wrapped


def _memory(rank: int, how: str, experts: int) -> tuple[int, int, int]:
    """Return bytes: of this rank's parameters, of its experts, and by which its device's memory grew at most."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=experts)
    _made(how, 2)
    on_cpu = parallel_state.local_device().type == "cpu"
    (reset_peak if on_cpu else torch.accelerator.reset_peak_memory_stats)()
    before = resident_bytes() if on_cpu else torch.accelerator.memory_allocated()
    wrapped = _made(how, LAYERS, **SIZES)
    parameters = list(wrapped.local_parameters())
    most = (peak_bytes() if on_cpu else torch.accelerator.max_memory_allocated()) - before
    return sum(p.nbytes for p in parameters), sum(p.nbytes for p in parameters if is_of_experts(p)), most


@pytest.mark.parametrize("how", ["deferred", "meta"])
def test_a_rank_has_memory_for_its_own_experts(how: str) -> None:
    for own, of_experts, most in run_ranks(2, _memory, how, 2):
        assert of_experts == EXPERTS_BYTES // 2
        # The experts of one layer are whole while the rank's part of them is taken.
        assert own < most < own + EXPERTS_BYTES // LAYERS + 2**24
