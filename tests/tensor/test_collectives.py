"""Which operations the collectives of a tensor group on gloo are."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nxdpp.ranks import parallel_state
from nxdpp.tensor import collectives
from tests.support.run_ranks import run_ranks


class Operations(TorchDispatchMode):
    """The operations of torch inside, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def gathers(rank: int) -> tuple[set[str], torch.Tensor]:
    # Its backend has the name "undefined".
    torch.distributed.init_process_group()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    with Operations() as operations:
        joined = collectives.all_gather(torch.full((2, 3), float(rank)), 1)
        collectives.reduce_scatter(torch.ones(2, 4), 1)
        collectives.all_reduce(torch.ones(2))
    parallel_state.destroy_model_parallel()
    return operations.names, joined


@pytest.mark.cpu_only("it is about gloo's threads")
def test_gathers_have_a_name_that_two_threads_of_gloo_may_note_at_once() -> None:
    for names, joined in run_ranks(2, gathers):
        sent = {name for name in names if "c10d" in name}
        assert sent == {
            "c10d.allgather_.default",
            "_c10d_functional.reduce_scatter_tensor.default",
            "_c10d_functional.all_reduce_.default",
            "_c10d_functional.wait_tensor.default",
        }
        assert torch.equal(joined, torch.tensor([[0.0, 0.0, 0.0, 1.0, 1.0, 1.0]] * 2))
