"""Errors of threads in the background, and the step that raises them."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from nxdpp.ranks.faults import background_errors


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    yield
    background_errors.raise_first()


def test_step_after_the_newest_of_all_ranks_raises_once() -> None:
    background_errors.begin_step()
    background_errors.keep(OSError("full"), lambda begun: [begun, begun + 2, begun - 1])
    background_errors.begin_step()
    background_errors.begin_step()
    with pytest.raises(OSError, match="full"):
        background_errors.begin_step()
    background_errors.begin_step()


def test_step_that_begins_during_the_agreement_waits_for_it() -> None:
    asked, told = threading.Event(), threading.Event()

    def all_of(begun: int) -> list[int]:
        asked.set()
        assert told.wait(30)
        return [begun]

    agreement = threading.Thread(target=background_errors.keep, args=(OSError("full"), all_of))
    agreement.start()
    assert asked.wait(30)
    threading.Timer(0.1, told.set).start()
    with pytest.raises(OSError, match="full"):
        background_errors.begin_step()
    agreement.join()


def test_program_without_a_further_step_ends_with_status_1() -> None:
    program = [
        "from nxdpp.ranks.faults import background_errors",
        "background_errors.keep(OSError('full'), lambda begun: [begun])",
        "try: background_errors.raise_first()",
        "except OSError: pass",
        "background_errors.keep(OSError('still full'), lambda begun: [begun])",
    ]
    environment = {**os.environ, "RANK": "3"}
    ended = subprocess.run([sys.executable, "-c", "\n".join(program)], capture_output=True, text=True, env=environment)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1:] == ["nxdpp: rank 3: error in the background: OSError: still full"]
    assert "OSError: full" not in ended.stderr
