"""Actions, their text, and what the package that holds them may not need."""

import subprocess
import sys

import pytest

from nxdpp.schedules.actions import Action, ActionKind


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(2, ActionKind.FORWARD, 0), "2F0"),
        (Action(0, ActionKind.BACKWARD, 13), "0B13"),
        (Action(1, ActionKind.SEND_ACTIVATION, 3), "1SEND_F3"),
        (Action(1, ActionKind.RECEIVE_ACTIVATION, 3), "1RECV_F3"),
        (Action(1, ActionKind.SEND_GRADIENT, 3), "1SEND_B3"),
        (Action(1, ActionKind.RECEIVE_GRADIENT, 3), "1RECV_B3"),
    ],
)
def test_text_form(action: Action, text: str) -> None:
    assert str(action) == text


def test_schedules_need_no_torch() -> None:
    program = """
import sys
from nxdpp.schedules import actions, forward_only, lowering, one_forward_one_backward
lowering.lower(one_forward_one_backward.one_forward_one_backward(2, 2), {(0, 1)})
foreign = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "numpy"})
assert not foreign, foreign
print("without torch")
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "without torch\n"
