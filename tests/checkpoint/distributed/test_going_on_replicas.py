"""Going on over more replicas than two, where the order of a sum shows in its last bit."""

from pathlib import Path

import torch

from nxdpp import parallel_state
from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint
from tests.checkpoint.distributed.layouts import Layout, Training
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import VOCABULARY, make


def _go_on(rank: int, path: Path) -> list[str]:
    """Names of the parameters whose values differ after a load in the middle."""
    parallel_state.initialize_model_parallel()

    def training() -> Training:
        return Training(lambda: make("llama"), Layout())

    def step(of: Training, number: int) -> None:
        ids = torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(100 * number + rank))
        of.step({"input_ids": ids, "labels": ids})

    whole, resumed = training(), training()
    for number in range(4):
        step(whole, number)
        if number == 1:
            save_checkpoint(path, "middle", whole.model, whole.optimizer, whole.scheduler)
    load_checkpoint(path, "middle", resumed.model, resumed.optimizer, resumed.scheduler)
    for number in range(2, 4):
        step(resumed, number)
    expected = dict(whole.model.local_named_parameters())
    return [name for name, each in resumed.model.local_named_parameters() if not torch.equal(each, expected[name])]


def test_the_first_step_after_a_load_averages_in_the_order_of_the_others(tmp_path: Path) -> None:
    assert run_ranks(3, _go_on, tmp_path) == [[], [], []]
