"""Zero1Optimizer behind a pipeline: 16 steps of a tied Llama equal those of plain AdamW in one process."""

from typing import Any

import torch

from nxdpp import NxDPPModel, parallel_state
from nxdpp.optimizer import NeuronZero1Optimizer
from tests.support.models import make, padded_batch, reference, train_in_one_process
from tests.support.run_ranks import run_ranks

STEPS = 16
# AdamW divides by the size of a gradient: rounding of one near zero would show with a smaller eps.
RATE: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6}


def train(rank: int) -> tuple[list[float], int, int]:
    """Return the norm of the gradients of each step, and the bytes of the state and of the local parameters."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    replica = parallel_state.get_data_parallel_rank()
    model = make("tied_llama", layers=2)
    whole = reference(model)
    wrapped = NxDPPModel(model, num_microbatches=2, use_zero1_optimizer=True)
    optimizer = NeuronZero1Optimizer(wrapped.local_named_parameters(), torch.optim.AdamW, max_norm=0.5, **RATE)
    plain = torch.optim.AdamW(whole.parameters(), **RATE)
    norms = []
    for step in range(STEPS):
        batch = padded_batch(8, length=6, seed=step)
        wrapped.run_train(**{name: value.chunk(2)[replica] for name, value in batch.items()})
        optimizer.step()
        optimizer.zero_grad()
        train_in_one_process(whole, batch, 4)
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
        assert optimizer.grad_norm is not None
        torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-5, atol=0)
        norms.append(norm.item())
    expected = dict(whole.named_parameters(remove_duplicate=False))
    for name, parameter in wrapped.local_named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-6)
    state = sum(t.nbytes for _, _, state in optimizer.shards() for t in state.values() if t.dim())
    return norms, state, sum(parameter.nbytes for parameter in wrapped.local_parameters())


def test_a_tied_llama_on_two_stages_and_two_replicas() -> None:
    results = run_ranks(4, train)
    assert max(results[0][0]) > 0.5
    for _, state, parameters in results:
        # AdamW has two numbers for each parameter, of which a rank keeps half.
        assert abs(state - parameters) <= 32
