"""Pairs of DualPipeV whose forward and backward take turns: one process's numbers, errors of each of the two."""

import copy
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nxdpp import NxDPPModel, apply_checkpoint, expert_parallelize, parallel_state, recorded_routing
from nxdpp.pipeline.runtime.overlapped_pair import OverlappedPair
from nxdpp.schedules.actions import pairs
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.lowering.additions import TOKENS, add
from nxdpp.schedules.lowering.lowering import lower
from nxdpp.schedules.lowering.rendezvous import check_lowered
from tests.experts.test_steps import _apart, _gradients
from tests.support.expert_models import batch_of, make, step_of_one_process
from tests.support.run_ranks import run_ranks

MICROBATCHES = 6


def test_no_rank_waits_forever_where_pairs_run_at_once() -> None:
    for ranks in (2, 3, 4, 8):
        for microbatches in (1, ranks, 2 * ranks + 1, 4 * ranks):
            schedule = FAMILIES["dualpipe-v"].build(ranks, microbatches)
            edges = [(stage, stage + 1) for stage in range(2 * ranks - 1)]
            for posted_ahead in (None, 0, 2):
                lowered = [add(each, TOKENS) for each in lower(schedule, edges, posted_ahead, paired=True)]
                check_lowered(lowered, edges, 2)


def _turns() -> list[int]:
    """Count the turns of backwards that run within a forward."""
    counted = [0]
    own = OverlappedPair._run_second

    def run_second(self: OverlappedPair) -> None:
        counted[0] += OverlappedPair.present is self
        own(self)

    OverlappedPair._run_second = run_second  # type: ignore[method-assign]
    return counted


def _compared(name: str, way: str) -> dict[str, float]:
    model = make(name, 4)
    whole = copy.deepcopy(model)
    wrapped = NxDPPModel(
        expert_parallelize(model),
        num_microbatches=MICROBATCHES,
        schedule="dualpipe-v",
        broadcast_and_average_loss=True,
    )
    if way == "recomputed":
        apply_checkpoint(wrapped)
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()
    batches = [batch_of(each, 2 * MICROBATCHES) for each in range(replicas)]
    means = step_of_one_process(whole, batches, MICROBATCHES)
    counted = _turns()
    loss = wrapped.run_train(**batches[replica])
    # A forward hands over three times for each of its layers of experts. The first layer of DeepSeek-V3 has none.
    own = wrapped.steps.schedule.training[wrapped.rank]
    layers = sum(own[place].stage > 0 or name == "mixtral" for place in pairs(own))
    assert counted[0] == 3 * layers > 0
    assert loss is not None
    found = {"loss": float(loss) - float(torch.stack(means).mean())}
    # A second step, whose gradients are added.
    step_of_one_process(whole, batches, MICROBATCHES)
    wrapped.run_train(**batches[replica])
    return _apart(found | _gradients(wrapped, whole))


def _all_compared(rank: int) -> list[Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=2)
    cases = [("mixtral", "plain"), ("deepseek_v3", "recomputed")]
    return [(*case, found) for case in cases if (found := _compared(*case))]


def test_pairs_take_turns_and_are_exact() -> None:
    assert run_ranks(4, _all_compared) == [[]] * 4


def _traced(rank: int, file: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=2)
    wrapped = NxDPPModel(
        expert_parallelize(make("mixtral", 4)),
        num_microbatches=MICROBATCHES,
        schedule="dualpipe-v",
        trace_file_path=file,
    )
    wrapped.run_train(**batch_of(parallel_state.get_data_parallel_rank(), 2 * MICROBATCHES))


def test_a_timeline_has_the_exchanges_of_pairs(tmp_path: Path) -> None:
    run_ranks(4, _traced, str(tmp_path / "steps.json"))
    rows = [each for each in json.loads((tmp_path / "steps.json").read_text()) if each.get("tid") == 0]
    told = [row | row["args"] for row in rows if "microbatch" in row.get("args", ())]
    actions = FAMILIES["dualpipe-v"].build(2, MICROBATCHES)[0]
    for place in pairs(actions):
        stage, kind, microbatch, _ = actions[place]
        own = [row for row in told if (row["stage"], row["microbatch"]) == (stage, microbatch)]
        (forward,) = (row for row in own if (row["cat"], row["kind"]) == ("compute", kind.value))
        end = forward["ts"] + forward["dur"]
        within = [row["kind"] for row in own if forward["ts"] <= row["ts"] and row["ts"] + row["dur"] <= end]
        # The numbers of tokens, tokens, and what the experts made of them.
        assert within == ["DISPATCH", "DISPATCH", "COMBINE", "F"]


class _Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        if OverlappedPair.present is not None and threading.current_thread() is not threading.main_thread():
            raise ValueError("no gradient today")
        return gradients[0]


def _stops(module: Any, given: Any, output: torch.Tensor) -> Any:
    return _Stops.apply(output)  # type: ignore[no-untyped-call]


def _raises(module: Any, given: Any, output: torch.Tensor) -> None:
    if OverlappedPair.present is not None and OverlappedPair.present._has_begun:
        raise ValueError("no forward today")


def _fails(rank: int, of_backward: bool) -> None:
    """Rank 1 has an error in the backward or in the forward of a pair, after the other action has begun."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=2)
    model = make("mixtral", 4)
    for layer in model.model.layers if rank == 1 else ():
        module = layer.post_attention_layernorm if of_backward else layer.mlp
        module.register_forward_hook(_stops if of_backward else _raises)
    wrapped = NxDPPModel(expert_parallelize(model), num_microbatches=MICROBATCHES, schedule="dualpipe-v")
    wrapped.run_train(**batch_of(0, 2 * MICROBATCHES))


@pytest.mark.parametrize("of_backward", [True, False])
def test_an_error_in_a_pair_is_told_with_its_action(of_backward: bool) -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError) as error:
        run_ranks(4, _fails, of_backward)
    text = str(error.value)
    assert f"ValueError: no {'gradient' if of_backward else 'forward'} today" in text
    assert ("backward of microbatch" if of_backward else "forward of microbatch") in text
    assert "stops because rank 1 failed with ValueError" in text
    assert time.monotonic() - started < 60


def _bytes_of_a_step(rank: int) -> tuple[int, int]:
    """Return the bytes of tokens that a rank sends to others in a step, and the least."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    wrapped = NxDPPModel(expert_parallelize(make("mixtral", 2)), num_microbatches=2)
    batch = batch_of(rank, 4)
    wrapped.run_train(**batch)
    sent, own = [0], dist.all_to_all_single

    def counted(output: torch.Tensor, given: torch.Tensor, came: Any, left: list[int], *rest: Any, **kw: Any) -> Any:
        if given.is_floating_point():
            sent[0] += sum(left[:rank] + left[rank + 1 :]) * given[0].numel() * given.element_size()
        return own(output, given, came, left, *rest, **kw)

    dist.all_to_all_single = counted  # type: ignore[assignment]
    with recorded_routing(wrapped) as routing:
        wrapped.run_train(**batch)
    choices = [each for of_layer in routing[0].values() for each in of_layer.values()]
    leave = sum(int((each // 2 != rank).sum()) for each in choices)
    came = sum(wrapped.last_expert_balance["experts"]) - sum(map(torch.Tensor.numel, choices)) + leave
    # Tokens and their gradients to the experts of the other rank, and what its tokens gave here.
    return sent[0], 2 * (leave + came) * 16 * 8


def test_no_token_is_sent_more_than_needed() -> None:
    for sent, least in run_ranks(2, _bytes_of_a_step):
        assert sent == least > 0
