"""Orders of the dimensions over processes: groups, training, save and load, in one start of the ranks."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nxdpp import NxDPPModel, load_pretrained, parallel_state, save_pretrained
from tests.checkpoint.huggingface.checkpointed_models import make, on_meta
from tests.support.run_ranks import run_ranks

ORDERS = (("data", "pipeline", "tensor"), ("tensor", "data", "pipeline"), ("pipeline", "data", "tensor"))
IDS = torch.arange(64).view(8, 8) % 32


def sums_of_groups(rank: int) -> dict[str, tuple[list[int], float]]:
    """Members of each group of this rank, and the sum of their ranks over it."""
    groups = {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "data": parallel_state.get_data_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        "model": parallel_state.get_model_parallel_group(),
        "alone": parallel_state.get_context_model_parallel_group(),
    }
    sums = {}
    for name, group in groups.items():
        value = torch.tensor([float(rank)])
        dist.all_reduce(value, group=group)
        sums[name] = (dist.get_process_group_ranks(group), value.item())
    return sums


def groups_in_orders(rank: int) -> list[tuple[Any, ...]]:
    found = []
    for order in ORDERS:
        parallel_state.initialize_model_parallel(2, 2, order=order)
        mesh = parallel_state.get_device_mesh()
        lists = {
            "tensor": parallel_state.get_tensor_model_parallel_group(as_list=True),
            "data": parallel_state.get_data_parallel_group(as_list=True),
            "pipeline": parallel_state.get_pipeline_model_parallel_group(as_list=True),
            "model": parallel_state.get_model_parallel_group(as_list=True),
        }
        found.append((mesh.mesh_dim_names, mesh.mesh.tolist(), lists, sums_of_groups(rank)))
        assert mesh["data", "tensor"].mesh.tolist() == mesh.mesh[mesh.get_local_rank("pipeline")].tolist()
        parallel_state.destroy_model_parallel()
    return found


def test_groups_follow_the_order_also_after_destroy() -> None:
    everyones = run_ranks(8, groups_in_orders)
    first_ranks = {order: everyones[0][index][1] for index, order in enumerate(ORDERS)}
    assert first_ranks[ORDERS[0]] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert first_ranks[ORDERS[1]] == [[[0, 4], [2, 6]], [[1, 5], [3, 7]]]
    assert first_ranks[ORDERS[2]] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    for rank, of_rank in enumerate(everyones):
        for names, _, lists, sums in of_rank:
            assert names == ("pipeline", "data", "tensor")
            for dimension, groups in lists.items():
                own = next(group for group in groups if rank in group)
                assert sums[dimension] == (own, sum(own))
            assert sums["alone"] == ([rank], rank)


def tied_llama() -> Any:
    """A model in float64: its weights are so large that the roundings of a device's kernels would grow."""
    return make("tied_llama").double()


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def expected_gradients() -> dict[str, torch.Tensor]:
    model = tied_llama()
    for part in IDS.chunk(4):
        (model(input_ids=part, labels=part).loss / 4).backward()
    return {name: gradient_of(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}


def train_save_and_load(rank: int, folder: Path, expected: dict[str, torch.Tensor]) -> None:
    for number, order in enumerate(ORDERS):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, order=order)
        model = NxDPPModel(tied_llama(), num_microbatches=2)
        own = IDS.chunk(2)[parallel_state.get_data_parallel_rank()]
        model.run_train(input_ids=own, labels=own)
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(gradient_of(parameter), expected[name], rtol=1e-5, atol=1e-7)
        save_pretrained(model, folder / str(number))
        loaded = NxDPPModel(on_meta("tied_llama").double(), num_microbatches=2)
        load_pretrained(loaded, folder / str(number))
        before = copy.deepcopy(dict(model.local_state_dict()))
        after = dict(loaded.local_state_dict())
        assert all(torch.equal(before[name].cpu(), after[name].cpu()) for name in before)
        parallel_state.destroy_model_parallel()


def test_steps_saves_and_loads_follow_the_order(tmp_path: Path) -> None:
    run_ranks(4, train_save_and_load, tmp_path, expected_gradients())
