"""Some types over two ranks with fake accelerators; ``python -m tools.zoo host-waits`` runs all of them."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.support import fake_device
from tools.zoo.host_waits import judge
from tools.zoo.sweep import Verdict

REASON = fake_device.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def judged(task: str, name: str) -> Verdict:
    """Judge in a new process: autograd counts its devices once, and other tests have run it here."""
    fake_device.built()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(judge, task, name).result()


@pytest.mark.parametrize(
    ("task", "name"),
    [("causal-lm", "gemma2"), ("seq2seq-lm", "t5"), pytest.param("causal-lm", "mixtral", marks=pytest.mark.sweep)],
)
def test_the_host_waits_for_nothing(task: str, name: str) -> None:
    assert judged(task, name) == ("no waits", "", "")


@pytest.mark.sweep
def test_a_type_that_asks_is_told() -> None:
    found = judged("causal-lm", "dbrx")
    assert found.result == "waits"
    assert "rank 0, from cpu: 32 times aten::_local_scalar_dense" in found.words
    assert "modeling_dbrx.py" in found.words
