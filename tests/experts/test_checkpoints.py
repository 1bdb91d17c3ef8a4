"""Checkpoints of divided experts load into any layout to the bit, and files have the names of Hugging Face."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import MixtralForCausalLM

from nxdpp import (
    NxDPPModel,
    deferred_init,
    expert_parallelize,
    init_on_device,
    load_checkpoint,
    load_pretrained,
    parallel_state,
    save_checkpoint,
    save_pretrained,
)
from nxdpp.initialization.parts import own_part, part_of
from tests.support.expert_models import batch_of, make, mixtral
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import differing


def _wrapped(seed: int = 7) -> tuple[NxDPPModel, torch.optim.Optimizer]:
    model = make("mixtral", 2)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    wrapped = NxDPPModel(expert_parallelize(model), num_microbatches=2)
    return wrapped, torch.optim.Adam(wrapped.local_parameters(), 0.01)


def _state(wrapped: NxDPPModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parameter in wrapped.local_named_parameters():
        part = part_of(parameter)
        found[name] = part and part.index, parameter.detach(), optimizer.state[parameter]["exp_avg"]
    return found


def _save(rank: int, pipeline: int, expert: int, folder: Path) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert)
    wrapped, optimizer = _wrapped()
    wrapped.run_train(**batch_of(parallel_state.get_data_parallel_rank(), 4))
    optimizer.step()
    save_checkpoint(folder / "training", "1", model=wrapped, optimizer=optimizer)
    save_pretrained(wrapped, folder / "files")
    dist.barrier()
    # A model without memory reads its own experts.
    torch.manual_seed(0)
    with init_on_device(torch.device("meta")):
        empty = make("mixtral", 2)
    loaded = NxDPPModel(expert_parallelize(empty), num_microbatches=2)
    load_pretrained(loaded, folder / "files")
    ours = dict(wrapped.local_named_parameters())
    assert all(torch.equal(each, ours[name]) for name, each in loaded.local_named_parameters())
    return _state(wrapped, optimizer)


def _load(rank: int, pipeline: int, expert: int, folder: Path) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert)
    wrapped, optimizer = _wrapped(seed=8)
    load_checkpoint(folder / "training", "1", model=wrapped, optimizer=optimizer)
    whole = MixtralForCausalLM.from_pretrained(folder / "files", dtype=torch.float64)
    assert differing(dict(wrapped.local_named_parameters()), whole) == []
    return _state(wrapped, optimizer)


def _joined(states: list[dict[str, Any]]) -> dict[str, list[torch.Tensor]]:
    """The whole values and states of all parameters."""
    parts: dict[str, dict[int, tuple[torch.Tensor, ...]]] = {}
    for state in states:
        for name, (index, *values) in state.items():
            parts.setdefault(name, {})[index or 0] = tuple(values)
    return {
        name: [torch.cat([found[index][i] for index in sorted(found)]) for i in range(2)]
        for name, found in parts.items()
    }


def test_a_layout_loads_the_checkpoint_of_another_to_the_bit(tmp_path: Path) -> None:
    saved = _joined(run_ranks(4, _save, 2, 2, tmp_path))
    for ranks, pipeline, expert in ((4, 1, 4), (1, 1, 1)):
        loaded = _joined(run_ranks(ranks, _load, pipeline, expert, tmp_path))
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
