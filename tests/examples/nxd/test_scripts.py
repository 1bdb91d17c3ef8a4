"""Scripts of the guides of NeuronX Distributed, tiny: several ranks train like one process."""

import importlib
import sys
from pathlib import Path

import pytest

from tests.support.run_ranks import run_ranks

FOLDER = str(Path(__file__).parents[3] / "examples" / "nxd")
STEPS = 6
BERT_STEPS = 24


def _train(rank: int, script: str, cases: list[list[str]]) -> list[list[float]]:
    """Losses of each case, one after the other in this process."""
    sys.path.insert(0, FOLDER)
    module = importlib.import_module(script)
    common = ["--steps", str(BERT_STEPS if script.startswith("bert") else STEPS), "--batch-size", "8"]
    return [module.train(module.read_arguments([*common, *case])) for case in cases]


def test_llama_of_the_pipeline_guide() -> None:
    cases = [f"--num-microbatches 2 --tensor-parallel-size {size}".split() for size in (1, 2)]
    several = [[*case, "--pipeline-parallel-size", "2"] for case in cases]
    several.append([*several[1], "--sequence-parallel"])
    ((expected,),) = run_ranks(1, _train, "llama_pipeline", cases[:1])
    for losses in run_ranks(4, _train, "llama_pipeline", several, timeout=120.0):
        for found in losses:
            assert found == pytest.approx(expected, abs=1e-5)
    assert len(expected) == STEPS
    assert expected[-1] < expected[0] - 0.5


def test_bert_of_the_tensor_parallel_guide() -> None:
    ((expected,),) = run_ranks(1, _train, "bert_tensor_parallel", [["--tensor-parallel-size", "1"]])
    found = run_ranks(4, _train, "bert_tensor_parallel", [["--tensor-parallel-size", "2"]], timeout=120.0)
    tensor_ranks = [[found[0], found[1]], [found[2], found[3]]]
    assert all(one == other for one, other in tensor_ranks)
    replicas = zip(*found[0], *found[2], strict=True)
    assert [sum(pair) / 2 for pair in replicas] == pytest.approx(expected, abs=1e-5)
    assert len(expected) == BERT_STEPS
    assert expected[-1] < expected[0] - 0.5
