"""Environment variables, threads and garbage collection of all tests, and their common fixture.

The single-process references have one thread, like the ranks: the order of a sum can depend on the threads.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# OpenMP reads this variable when torch is loaded.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The ranks of a test run on the CPU, also on a machine with fewer CUDA devices than ranks.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# torch looks up the name of every address that connects: a lost answer costs 1 s in place of 5.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

import pytest
import torch

from tests.support.torchvision_operators import define_missing_operators

torch.set_num_threads(1)
define_missing_operators()

# Folders whose tests compare numbers, files and messages, which no version of Python is likely to change. All of them
# have the mark one_python.
ONE_PYTHON = (
    "benchmarks", "checkpoint/distributed", "checkpoint/huggingface", "docs", "doors", "examples", "gradients",
    "pipeline/partition", "pipeline/stages", "planning", "schedules/transport_model", "tensor",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of ``ONE_PYTHON`` before marks select tests."""
    folders = tuple(f"{Path(__file__).parent / name}{os.sep}" for name in ONE_PYTHON)
    for item in items:
        if str(item.path).startswith(folders):
            item.add_marker("one_python")


def pytest_collection_finish() -> None:
    """Leave the objects of imported modules out of garbage collections, as ``tests/support/preloaded.py`` does."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Make this process a job of one rank."""
    from nxdpp import parallel_state

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=1)
    yield
    parallel_state.destroy_model_parallel()
