"""A rank that fails in a step ends all ranks, with a note of the stage, action and microbatch."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
LAST_WORDS = {
    "forward": "in the pipeline: stage 1, forward of microbatch 1 (action 1F1)",
    "backward": "in the pipeline: stage 1, backward of microbatch 1 (action 1B1)",
    "input": "ValueError: a batch of 6 (input_ids, attention_mask, labels) does not divide into num_microbatches=4.",
}


def errors_of(program: str, ranks: int, *arguments: str) -> str:
    """Run a program that must fail under torchrun; its errors, when all ranks end within 10 s of the first failure."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launch, str(FOLDER / program), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    finished = time.time()
    failed = re.search(r"fails at (\S+)", ended.stderr)
    assert failed, ended.stderr
    assert ended.returncode != 0
    assert finished - float(failed[1]) < 10, ended.stderr
    return ended.stderr


@pytest.mark.parametrize("where", ["forward", "backward", "input"])
def test_the_first_error_is_the_last_thing_printed(where: str) -> None:
    errors = errors_of("failing_program.py", 4, where)
    # torchrun prints its own report after the end of the workers.
    of_workers = errors.split("torch/distributed/elastic/multiprocessing/api.py")[0]
    lines = [line for line in of_workers.strip().splitlines() if not re.match(r"[WE]\d{4} ", line)]
    assert LAST_WORDS[where] in lines[-1], errors
    if where != "input":
        assert any("ArithmeticError: the layer broke" in line for line in lines[-3:]), errors


@pytest.mark.parametrize(
    ("schedule", "where", "words"),
    [
        ("interleaved", "backward", "stage 3, backward of microbatch 1 (action 3B1)"),
        ("zb-v", "backward", "stage 2, input gradient of microbatch 1 (action 2I1)"),
    ],
)
def test_a_failure_names_the_stage_of_the_rank(schedule: str, where: str, words: str) -> None:
    errors = errors_of("failing_stage.py", 2, schedule, where)
    assert f"in the pipeline: {words}" in errors, errors
    assert "ArithmeticError: the layer broke" in errors, errors
