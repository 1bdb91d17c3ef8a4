"""A type over two ranks with fake accelerators; ``python -m tools.zoo host-waits`` runs all of them."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.support import fake_device
from tools.zoo.host_waits import judge

REASON = fake_device.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def test_the_host_waits_for_nothing() -> None:
    """In a new process: autograd counts its devices once, and other tests have run it here."""
    fake_device.built()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(judge, "seq2seq-lm", "t5").result() == ("no waits", "", "")
