"""A training without private names, equal to one with them, and refusals by name of what needs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from nxdpp.ground.names import NeededAttribute
from nxdpp.ground.torch_names import ENGINE
from tests.ground.trained_without import results, tables
from tests.support.run_ranks import run_ranks


def results_without(*gone: str) -> dict[str, str]:
    """Return the results of an interpreter in which nxdpp is imported without these names."""
    program = [sys.executable, "-W", "ignore", "-m", "tests.ground.trained_without", *gone]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        program, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    # torch 2.9 prints lines of gloo there.
    found: dict[str, str] = json.loads(ran.stdout.splitlines()[-1])
    return found


def results_with_all(rank: int) -> dict[str, str]:
    return results()


def test_a_model_trains_without_the_names_of_features() -> None:
    (present,) = run_ranks(1, results_with_all)
    # All else of nxdpp stands on the registries and hooks of modules, versions of tensors and autograd's engine.
    of_features = [each for each in tables() if not isinstance(each, NeededAttribute) and each is not ENGINE]
    gone = results_without(*(each.path for each in of_features))
    assert gone.pop("loss") == present.pop("loss")
    assert set(present.values()) == {"works"}
    assert gone.pop("apply_checkpoint") == "works"
    uses = {feature: text.split("with which nxdpp ")[1].split(". This is refused")[0] for feature, text in gone.items()}
    assert uses == {
        "save_checkpoint": "leaves out of a checkpoint the buffers that torch leaves out",
        "deferred_init": "asks a tensor of deferred_init what torch knows",
        "fully_shard": "shards parameters over replicas",
        "apply_compile": "refuses CUDA graphs of compiled layers",
        "generate": "runs a module of generate with its hooks",
    }
