"""A rank that fails in a step ends all ranks, and says on which stage, in which action, on which microbatch."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).with_name("failing_program.py"))
LAST_WORDS = {
    "forward": "in the pipeline: stage 1, forward of microbatch 1 (action 1F1)",
    "backward": "in the pipeline: stage 1, backward of microbatch 1 (action 1B1)",
    "input": "ValueError: a batch of 6 (input_ids, attention_mask, labels) does not divide into num_microbatches=4.",
}


@pytest.mark.parametrize("where", ["forward", "backward", "input"])
def test_the_first_error_is_the_last_thing_printed(where: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", PROGRAM, where]
    ended = subprocess.run(launch, capture_output=True, text=True, timeout=120, env=environment)
    finished = time.time()
    failed = re.search(r"fails at (\S+)", ended.stderr)
    assert failed, ended.stderr
    assert ended.returncode != 0
    assert finished - float(failed[1]) < 10, ended.stderr
    # torchrun adds its own account when the workers are gone.
    of_workers = ended.stderr.split("torch/distributed/elastic/multiprocessing/api.py")[0]
    lines = [line for line in of_workers.strip().splitlines() if not re.match(r"[WE]\d{4} ", line)]
    assert LAST_WORDS[where] in lines[-1], ended.stderr
    if where != "input":
        assert any("ArithmeticError: the layer broke" in line for line in lines[-3:]), ended.stderr
