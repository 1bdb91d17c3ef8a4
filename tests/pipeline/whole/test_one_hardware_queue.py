"""No circle of waits with one hardware queue: tensor x pipeline x data parallelism on 8 ranks of the fake accelerator.

``run_ranks`` replays the operations of all communicators after each run.
"""

from typing import NamedTuple

import pytest
import torch

from nxdpp import NxDPPModel, fully_shard, parallel_state, tensor_parallelize
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from tests.support import fake_device
from tests.support.models import llama, padded_batch
from tests.support.run_ranks import DEVICE, run_ranks

REASON = fake_device.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


class Case(NamedTuple):
    """A model: its ranks, its schedule, and who divides its state: ZeRO-1, or shards freed after each forward."""

    tensor: int
    pipeline: int
    schedule: str
    state: str


CASES = (Case(1, 4, "1f1b", "zero1"), Case(2, 2, "zb-v", "freed shards"))


def _train_and_generate(case: Case) -> None:
    pipeline = case.pipeline
    parallel_state.initialize_model_parallel(case.tensor, pipeline)
    assert parallel_state.get_data_parallel_size() == 2
    torch.manual_seed(0)
    bare = llama(2 * pipeline, tie_word_embeddings=True, num_attention_heads=2, hidden_size=8, intermediate_size=8)
    model = NxDPPModel(
        tensor_parallelize(bare) if case.tensor > 1 else bare,
        num_microbatches=pipeline + 1,
        schedule=case.schedule,
        broadcast_and_average_loss=True,
        use_zero1_optimizer=case.state == "zero1",
    )
    if case.state == "freed shards":
        fully_shard(model, reshard_after_forward=True)
    else:
        model.move_model_to_device()
    kind = torch.optim.AdamW
    optimizer = (
        Zero1Optimizer(model.local_parameters(), kind, lr=0.1)
        if case.state == "zero1"
        else kind(model.local_parameters(), lr=0.1)
    )
    batch = padded_batch(pipeline + 1, seed=parallel_state.get_data_parallel_rank())
    for _ in range(2):
        model.run_train(**batch)
        if case.state != "zero1":
            model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.run_eval(**batch)
    model.eval().generate(batch["input_ids"], max_new_tokens=3, pad_token_id=0)
    parallel_state.destroy_model_parallel()


def _run_all(rank: int) -> None:
    for case in CASES:
        _train_and_generate(case)


def test_eight_ranks_train_evaluate_and_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_device.built()
    monkeypatch.setenv(DEVICE, "fake")
    monkeypatch.setenv("FAKE_ONE_QUEUE", "1")
    run_ranks(8, _run_all)
