"""``device`` of ``load_merged_state_dict`` and ``load_deduped_state_dict``, on the meta device."""

from collections.abc import Iterator

import pytest
import torch

from nxdpp import parallel_state
from nxdpp.nnscaler import (
    ComputeConfig,
    ParallelModule,
    build_optimizer,
    deduped_state_dict,
    load_deduped_state_dict,
    load_merged_state_dict,
)
from tests.doors.nnscaler.own_folders import parallelize
from tests.doors.nnscaler.trained_modules import WIDTH, Net


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


def _made(use_zero: bool = False) -> ParallelModule:
    model = parallelize(Net(), {"x": torch.ones(2, WIDTH)}, "dp", ComputeConfig(1, 1, use_zero=use_zero))
    assert isinstance(model, ParallelModule)
    return model


@pytest.mark.filterwarnings("ignore:.*which is a no-op")
def test_a_load_moves_the_module() -> None:
    merged, deduped = _made(), _made()
    load_merged_state_dict(merged, Net().state_dict(), device="cpu")
    assert all(tensor.device.type == "cpu" for tensor in merged.parameters())
    load_merged_state_dict(merged, Net().state_dict(), device="meta")
    state, _ = deduped_state_dict(deduped)
    assert state is not None
    load_deduped_state_dict(deduped, state, device="cpu")
    assert all(tensor.is_meta for tensor in [*merged.parameters(), *merged.buffers()])


def test_shards_of_an_optimizer_stay() -> None:
    model = _made(use_zero=True)
    optimizer = build_optimizer(model, torch.optim.Adam)
    module_state, state = deduped_state_dict(model, optimizer)
    assert module_state is not None
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    with pytest.raises(ValueError, match="with an optimizer that keeps shards of its parameters there"):
        load_deduped_state_dict(model, module_state, optimizer, state, device="meta")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
