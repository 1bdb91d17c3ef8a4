"""Faults of rank 1 of two: which rank the others name, and how soon all ranks have ended."""

import os
import re
import signal
import time
from typing import Any

import torch

from benchmarks.first_hour.place import Found, Rank
from benchmarks.first_hour.start import FAILED, HUNG, PASSED, Ended
from nxdpp import NxDPPModel
from tests.support.faulty_program import Layer, Model, fails_now

STUCK, KILLED = "a stuck layer", "a kill"
CASES = [STUCK, KILLED]
STEPS, FAULTY_STEP, FAULTY_RANK = 100, 3, 1
HANG_TIMEOUT, HANG_TIMEOUT_DRY = 10.0, 3.0
_MOST_SECONDS = 20.0
"""Seconds after the fault, beyond ``hang_timeout`` of a stuck layer, in which all ranks must have ended."""


def run(rank: Rank, case: str) -> Found:
    """Train until the fault."""
    hang_timeout = HANG_TIMEOUT_DRY if rank.place.dry else HANG_TIMEOUT
    device = rank.begin(hang_timeout=hang_timeout)
    print(f"hang_timeout {hang_timeout}")
    torch.manual_seed(0)
    model = NxDPPModel(
        Model(2 * rank.count), transformer_layer_cls=Layer, num_microbatches=4, output_loss_value_spec=True
    )
    model.move_model_to_device(device)
    for step in range(STEPS):
        if step == FAULTY_STEP and rank.number == FAULTY_RANK:
            if case == KILLED:
                fails_now()
                os.kill(os.getpid(), signal.SIGKILL)
            layer = next(module for module in model.local_module.modules() if isinstance(module, Layer))
            layer.fault = lambda: time.sleep(1000)
        model.run_train(x=torch.ones(8, 8))
    return Found({}, "no fault has ended the ranks")


def judge(case: str, ended: Ended) -> dict[str, Any]:
    """Return the result of a fault: passed if each rank that can names rank 1, and all have ended soon."""
    output = "\n".join(ended.outputs)
    naming = [rank for rank, text in enumerate(ended.outputs) if _names_the_faulty(text)]
    began = [float(at) for at in re.findall(r"^fault at (\S+)", output, re.M)]
    limits = [float(seconds) for seconds in re.findall(r"^hang_timeout (\S+)", output, re.M)]
    if not began or not limits:
        return {"result": FAILED, "error": f"the ranks have not come to the fault\n{ended.error()}"}
    allowed = _MOST_SECONDS + (limits[0] if case == STUCK else 0.0)
    seconds = ended.at - began[0]
    expected = [0, 1] if case == STUCK else [0]
    passed = naming == expected and seconds <= allowed and not ended.hung
    figures = {"named_by": naming, "seconds_to_the_end": round(seconds, 1), "hang_timeout": limits[0]}
    found = {"result": PASSED if passed else HUNG if ended.hung else FAILED, "figures": [figures]}
    if not passed:
        found["error"] = f"rank 1 must be named by ranks {expected} within {allowed} s\n{ended.error()}"
    return found


def _names_the_faulty(text: str) -> bool:
    return any(re.search(r"\brank 1\b", line) for line in re.findall(r"^rank \d stops because (.*)", text, re.M))
