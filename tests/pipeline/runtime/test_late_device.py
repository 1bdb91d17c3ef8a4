"""Steps on devices that run late, with streams and the memory rules of CUDA: exact, and without a wait of the host."""

import pytest
from torch.utils import backend_registration

from nxdpp.schedules.families.registry import FAMILIES
from tests.pipeline.runtime.late_pipeline import CHANGES, compare
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.one_python

FEW = ["gpipe", "zb-v"]

EXPECTED: dict[str, list[str]] = {
    # No host waits for its device in these.
    "nccl": [],
    "average": [],
    # Here sends wait for the copies to the host.
    "gloo": [],
    "average without a wait": ["alone", "first", "second"],
    "hashes": [],
    "hashes without a wait": ["ids", "mask", "ids", "mask"],
    **{change: ["gpipe"] for change in CHANGES},
}


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch takes no device type written in Python",
)
@pytest.mark.parametrize(
    "families",
    [pytest.param(FEW, id="few"), pytest.param(sorted(FAMILIES), id="all", marks=pytest.mark.sweep)],
)
def test_numbers_are_those_of_one_process_and_wrong_without_a_wait(families: list[str]) -> None:
    # One process for all cases, and its own: a device type stays, and autograd on one forbids forks.
    (found,) = run_ranks(1, compare, families, timeout=220.0)
    assert {case.removeprefix("nccl ").removeprefix("gloo "): names for case, names in found.items()} == EXPECTED
