"""Checkpoints of divided experts load into any layout to the bit, and files have the names of Hugging Face."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import MixtralForCausalLM

from nxdpp import (
    NxDPPModel,
    deferred_init,
    expert_parallelize,
    fully_shard,
    gather_state_dict,
    init_on_device,
    load_checkpoint,
    load_pretrained,
    parallel_state,
    save_checkpoint,
    save_pretrained,
)
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from nxdpp.gradients.shards.local_tensors import local_rows
from nxdpp.initialization.parts import own_part, part_of
from nxdpp.tensor.shards import all_rows, first_row
from tests.support.expert_models import batch_of, make, mixtral
from tests.support.run_ranks import run_ranks

# Per piece of a parameter that a rank steps: its experts' index and first element, with values and state.
State = dict[str, dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]]


def _wrapped(form: str, seed: int = 7) -> tuple[NxDPPModel, torch.optim.Optimizer]:
    model = make("mixtral", 2)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    wrapped = NxDPPModel(expert_parallelize(model), num_microbatches=2, use_zero1_optimizer=form == "zero1")
    if form == "zero1":
        return wrapped, Zero1Optimizer(wrapped.local_named_parameters(), torch.optim.Adam, lr=0.01)
    if form == "sharded":
        fully_shard(wrapped)
    return wrapped, torch.optim.Adam(wrapped.local_parameters(), 0.01)


def _state(wrapped: NxDPPModel, optimizer: torch.optim.Optimizer) -> State:
    named = list(wrapped.local_named_parameters())
    pieces: list[tuple[str, nn.Parameter, int, nn.Parameter, dict[str, Any]]] = [
        (name, each, first_row(each) * prod(each.shape[1:]), each, optimizer.state.get(each, {}))
        for name, each in named
    ]
    if isinstance(optimizer, Zero1Optimizer):
        shards = optimizer.shards()
        pieces = [(*named[shard.parameter], shard.start, values, state) for shard, values, state in shards]
    found: State = {}
    for name, parameter, start, values, state in pieces:
        part = part_of(parameter)
        place = (0 if part is None else part.index), start
        own, average = (local_rows(each).detach().reshape(-1) for each in (values, state["exp_avg"]))
        found.setdefault(name, {})[place] = own, average
    return found


def _save(rank: int, pipeline: int, expert: int, folder: Path, form: str = "") -> State:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert)
    wrapped, optimizer = _wrapped(form)
    wrapped.run_train(**batch_of(parallel_state.get_data_parallel_rank(), 4))
    optimizer.step()
    save_checkpoint(folder / "training", "1", model=wrapped, optimizer=optimizer)
    save_pretrained(wrapped, folder / "files")
    dist.barrier()
    if (gathered := gather_state_dict(wrapped)) is not None:
        whole = MixtralForCausalLM.from_pretrained(folder / "files", dtype=torch.float64).state_dict()
        assert gathered.keys() == whole.keys()
        assert all(torch.equal(each.cpu(), whole[name].cpu()) for name, each in gathered.items())
    # A model without memory reads its own experts.
    torch.manual_seed(0)
    with init_on_device(torch.device("meta")):
        empty = make("mixtral", 2)
    loaded = NxDPPModel(expert_parallelize(empty), num_microbatches=2)
    load_pretrained(loaded, folder / "files")
    ours = dict(wrapped.local_named_parameters())
    assert all(torch.equal(each.cpu(), all_rows(ours[name]).cpu()) for name, each in loaded.local_named_parameters())
    return _state(wrapped, optimizer)


def _load(rank: int, pipeline: int, expert: int, folder: Path, form: str = "") -> State:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert)
    wrapped, optimizer = _wrapped(form, 8)
    load_checkpoint(folder / "training", "1", model=wrapped, optimizer=optimizer)
    whole = MixtralForCausalLM.from_pretrained(folder / "files", dtype=torch.float64)
    for name, each in wrapped.local_named_parameters():
        assert torch.equal(all_rows(each).cpu(), own_part(whole.get_parameter(name).detach(), each).cpu()), name
    return _state(wrapped, optimizer)


def _joined(states: list[State]) -> dict[str, list[torch.Tensor]]:
    """The whole values and states of all parameters, flat."""
    parts: State = {}
    for state in states:
        for name, pieces in state.items():
            parts.setdefault(name, {}).update(pieces)
    return {
        name: [torch.cat([found[place][i] for place in sorted(found)]) for i in range(2)]
        for name, found in parts.items()
    }


@pytest.mark.parametrize(
    ("layout", "others"),
    [
        ((4, 2, 2), [(4, 1, 4), (1, 1, 1), (4, 1, 2, "zero1"), (4, 1, 2, "sharded")]),
        # Two copies of each expert share their state; with size 4 there is one.
        ((4, 1, 2, "zero1"), [(4, 2, 2, "zero1"), (4, 1, 4, "zero1"), (1, 1, 1)]),
        ((4, 1, 2, "sharded"), [(4, 2, 2, "sharded"), (4, 1, 4), (1, 1, 1, "sharded")]),
    ],
)
def test_a_layout_loads_the_checkpoint_of_another_to_the_bit(
    tmp_path: Path, layout: tuple[Any, ...], others: list[tuple[Any, ...]]
) -> None:
    ranks, pipeline, expert, *form = layout
    saved = _joined(run_ranks(ranks, _save, pipeline, expert, tmp_path, *form))
    for ranks, pipeline, expert, *form in others:
        loaded = _joined(run_ranks(ranks, _load, pipeline, expert, tmp_path, *form))
        assert loaded.keys() == saved.keys()
        for name, values in loaded.items():
            assert all(map(torch.equal, values, saved[name])), name


def _initial(rank: int) -> list[str]:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    torch.manual_seed(5)
    model = deferred_init(mixtral, 2)
    wrapped = NxDPPModel(expert_parallelize(model), num_microbatches=2)
    torch.manual_seed(5)
    whole = mixtral(2)
    wrapped.move_model_to_device()
    return [
        name
        for name, parameter in wrapped.local_named_parameters()
        if not torch.equal(parameter, own_part(whole.get_parameter(name), parameter))
    ]


def test_deferred_experts_have_the_initial_weights_of_one_process() -> None:
    assert run_ranks(2, _initial) == [[], []]
