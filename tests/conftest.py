"""Environment variables, threads and garbage collection of all tests, and their common fixture.

The single-process references have one thread, like the ranks: the order of a sum can depend on the threads.
"""

import atexit
import gc
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

# The interpreters that tests start, and the workers, have the settings of this folder's sitecustomize.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (f"{Path(__file__).parent}/support/interpreter", os.environ.get("PYTHONPATH")))
)
# OpenMP reads this variable when torch is loaded.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The ranks of a test run on the CPU, also on a machine with fewer CUDA devices than ranks.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# torch looks up the name of every address that connects: a lost answer costs 1 s in place of 5.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

import pytest
import torch

from tests.support import fake_device
from tests.support.run_ranks import DEVICE
from tests.support.torchvision_operators import define_missing_operators

# Tests give sys.path to the interpreters that they start.
sys.path[:] = dict.fromkeys([*sys.path, f"{Path(__file__).parent}/support/interpreter"])
atexit.register(gc.freeze)
torch.set_num_threads(1)
define_missing_operators()

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the device of the ranks."""
    parser.addoption("--device", choices=("cpu", "fake"), default="cpu", help="device on which run_ranks starts ranks")


def pytest_configure(config: pytest.Config) -> None:
    """Tell the ranks their device, and build the fake accelerator if it is that."""
    os.environ[DEVICE] = config.getoption("device")
    if config.getoption("device") == "fake":
        reason = fake_device.why_not()
        if reason is not None:
            raise pytest.UsageError(f"--device fake: {reason}")
        fake_device.built()


# Folders and files whose tests compare numbers, files and messages, which no version of Python is likely to change. All
# of them have the mark one_python.
ONE_PYTHON = (
    "agreement", "benchmarks", "checkpoint", "devices", "docs", "doors", "examples", "generation", "gradients",
    "hosts", "initialization", "loops", "pipeline/after_wrapping", "pipeline/backward",
    "pipeline/local/test_four_bit.py", "pipeline/loss/test_normalization.py", "pipeline/microbatches",
    "pipeline/p2p", "pipeline/partition", "pipeline/stages", "pipeline/test_compiled_tensor_parallel.py",
    "pipeline/test_first_partition.py", "pipeline/test_late_trace.py", "pipeline/test_microbatches.py",
    "pipeline/test_model_eval.py", "pipeline/test_model_refusals.py", "pipeline/test_model_train.py",
    "pipeline/test_post_partition_hooks.py", "pipeline/test_structured_samples.py",
    "pipeline/whole/test_exactness.py", "pipeline/whole/test_input_values.py", "pipeline/whole/test_loss_fn.py",
    "pipeline/whole/test_modes_over_ranks.py", "pipeline/whole/test_move.py", "pipeline/whole/test_other_calls.py",
    "pipeline/whole/test_overlapped_average.py", "pipeline/whole/test_peft.py",
    "pipeline/whole/test_sequence_heads.py", "pipeline/whole/test_shared_keys.py",
    "pipeline/whole/test_tensor_parallel.py", "pipeline/whole/test_three_dimensions.py",
    "pipeline/whole/test_tracing_options.py", "pipeline/whole/test_vision_language.py",
    "pipeline/whole/test_wrapped_transformers.py", "pipeline/whole/test_wrapping_allocates_nothing.py", "planning",
    "ranks/faults/test_waits.py", "ranks/test_launch.py", "schedules", "support", "tensor", "test_class_names.py",
    "test_migration_names.py", "tracing/costs", "tracing/models/test_captured_outputs.py",
    "tracing/models/test_loss_leaves.py", "tracing/models/test_torch_transformer.py",
    "tracing/state/test_data_changes.py", "tracing/state/test_shared_objects.py", "watching",
)  # fmt: skip
COLLECTED = pytest.StashKey[set[str]]()
"""Files with collected tests below tests/, and the lines of sweeps.toml that some of them match."""
SWEEPS = tomllib.loads((HERE / "sweeps.toml").read_text())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that are not wanted, since imports take long.

    They have no test over ranks, for ``--device fake``, or only tests with the mark one_python.
    """
    if collection_path.suffix != ".py":
        return None
    if config.getoption("device") != "cpu" and "run_ranks" not in collection_path.read_text():
        return True
    if "not one_python" not in config.option.markexpr:
        return None
    mark = "\npytestmark = pytest.mark.one_python\n"
    return _of_one_python(collection_path) or mark in collection_path.read_text() or None


def _of_one_python(path: Path) -> bool:
    return f"{path.relative_to(HERE).as_posix()}/".startswith(tuple(f"{name}/" for name in ONE_PYTHON))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of ``ONE_PYTHON`` and of sweeps.toml before marks select tests."""
    collected = config.stash.setdefault(COLLECTED, set())
    sweeps = {pattern: re.compile(pattern) for pattern in SWEEPS}
    for item in items:
        path = item.path.relative_to(HERE).as_posix()
        collected.add(path)
        if _of_one_python(item.path):
            item.add_marker("one_python")
        for mark in item.iter_markers("cpu_only"):
            reason = reason_of(mark, item.nodeid)
            if config.getoption("device") != "cpu":
                item.add_marker(pytest.mark.skip(reason=reason))
        name = f"{path}::{item.nodeid.partition('::')[2]}"
        matched = [pattern for pattern, compiled in sweeps.items() if compiled.fullmatch(name)]
        if matched:
            collected.update(matched)
            item.add_marker("sweep")


def reason_of(mark: pytest.Mark, test: str) -> str:
    """Return why a test with the mark cpu_only cannot hold on a device; raise ``UsageError`` if it does not tell."""
    if len(mark.args) != 1 or not str(mark.args[0]).strip():
        raise pytest.UsageError(f"{test}: write why it cannot hold on a device: pytest.mark.cpu_only('reason')")
    return f"only on the CPU: {mark.args[0]}"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the fake accelerator if a test needs it, so that no test's time has the build.

    Leave the objects of imported modules out of garbage collections, as ``tests/support/preloaded.py`` does.
    """
    needed = any(getattr(getattr(item, "module", None), "fake_device", None) is fake_device for item in session.items)
    if needed and not session.config.option.collectonly and fake_device.why_not() is None:
        fake_device.built()
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Make this process a job of one rank."""
    from nxdpp import parallel_state

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=1)
    yield
    parallel_state.destroy_model_parallel()
