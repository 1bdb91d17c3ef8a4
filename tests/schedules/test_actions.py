"""Actions, their text, and the imports of the package."""

import subprocess
import sys

import pytest

from nxdpp.schedules.actions import Action, ActionKind

TEXTS = [
    (Action(2, ActionKind.FORWARD, 0), "2F0"),
    (Action(0, ActionKind.BACKWARD, 13), "0B13"),
    (Action(12, ActionKind.INPUT_GRADIENT, 3), "12I3"),
    (Action(1, ActionKind.WEIGHT_GRADIENT, 3), "1W3"),
    (Action(1, ActionKind.SEND_ACTIVATION, 3), "1SEND_F3"),
    (Action(1, ActionKind.RECEIVE_ACTIVATION, 3), "1RECV_F3"),
    (Action(1, ActionKind.SEND_GRADIENT, 3), "1SEND_B3"),
    (Action(1, ActionKind.RECEIVE_GRADIENT, 3, peer=2), "1RECV_B3@2"),
]


@pytest.mark.parametrize(("action", "text"), TEXTS)
def test_text_form(action: Action, text: str) -> None:
    assert str(action) == text


def test_schedules_need_no_torch() -> None:
    program = """
import pkgutil, importlib, sys
import nxdpp.schedules
for module in pkgutil.walk_packages(nxdpp.schedules.__path__, "nxdpp.schedules."):
    importlib.import_module(module.name)
foreign = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "numpy"})
assert not foreign, foreign
print("without torch")
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "without torch\n"
