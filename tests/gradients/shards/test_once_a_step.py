"""Memory of units that are gathered once a step: messages of gathers, and half gradients."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import NxDPPModel, fully_shard, parallel_state
from nxdpp.gradients.shards.unit import ShardedUnit
from nxdpp.pipeline.runtime.stage_runner import StageRunner
from tests.support.run_ranks import run_ranks

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5}


def _counts(rank: int) -> tuple[int, int, int]:
    """The most gathers on their way, and half gradients of the parameters after backwards, of this number."""
    on_their_way: set[ShardedUnit] = set()
    most = half = trained = 0
    start, make_whole, backward = ShardedUnit.start_gather, ShardedUnit.make_whole, StageRunner.backward

    def counted_start(unit: ShardedUnit) -> None:
        nonlocal most
        if not unit.is_whole:
            on_their_way.add(unit)
            most = max(most, len(on_their_way))
        start(unit)

    def counted_make_whole(unit: ShardedUnit) -> None:
        make_whole(unit)
        on_their_way.discard(unit)

    def counted_backward(runner: StageRunner, microbatch: int) -> None:
        nonlocal half, trained
        backward(runner, microbatch)
        assert model.part.shards is not None
        for unit in model.part.shards.units if microbatch < 2 else ():
            gradients = [each.grad for each in unit.whole_trained() if each.grad is not None]
            half += sum(gradient.dtype == torch.bfloat16 for gradient in gradients)
            trained += len(unit.whole_trained())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedUnit, "start_gather", counted_start)
        patch.setattr(ShardedUnit, "make_whole", counted_make_whole)
        patch.setattr(StageRunner, "backward", counted_backward)
        parallel_state.initialize_model_parallel()
        torch.manual_seed(0)
        model = NxDPPModel(LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **SIZES)), num_microbatches=3)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        tokens = torch.randint(0, 64, (3, 8), generator=torch.Generator().manual_seed(rank))
        model.run_train(input_ids=tokens, labels=tokens)
        parallel_state.destroy_model_parallel()
    return most, half, trained


def test_few_messages_and_half_gradients_exist_at_once() -> None:
    """Two of 6 gathers, and no gradient of the 2 backwards before the last waits for its action's end."""
    assert run_ranks(2, _counts) == [(2, 0, 2 * (9 * 5 + 3))] * 2
