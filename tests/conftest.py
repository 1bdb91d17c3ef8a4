"""Environment variables, threads and garbage collection of all tests, and their common fixture.

The single-process references have one thread, like the ranks: the order of a sum can depend on the threads.
"""

import atexit
import gc
import os
import sys
import warnings
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


# Folders and files whose tests a version of Python may change: bytecode, frames, names in code, standard classes,
# threads and ends of processes. All of them have the mark both_pythons.
BOTH_PYTHONS = (
    "ground", "initialization/test_deferred_init.py", "pipeline/local/test_part.py",
    "pipeline/test_settings.py", "pipeline/whole/test_failures.py", "pipeline/whole/test_plain_models.py",
    "pipeline/whole/test_spines.py", "ranks/faults/test_ending_process.py", "ranks/faults/test_faults.py",
    "ranks/faults/test_one_name.py", "ranks/faults/test_progress.py", "ranks/test_launcher.py",
    "ranks/test_restarts.py", "ranks/test_wire_form.py", "test_main.py", "test_names.py", "test_packaging.py",
    "tracing/code", "tracing/graph", "tracing/models/test_dataclass_calls.py", "tracing/modules",
    "tracing/state/test_second_run.py", "tracing/values",
)  # fmt: skip
assert all((HERE / name).exists() for name in BOTH_PYTHONS), "a path of BOTH_PYTHONS is not there"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that are not wanted, since imports take long.

    They have no test over ranks, for ``--device fake``, or no test with the mark both_pythons.
    """
    if collection_path.suffix != ".py":
        return None
    if config.getoption("device") != "cpu" and "run_ranks" not in collection_path.read_text():
        return True
    wanted = collection_path.name == "__init__.py" or _of_both_pythons(collection_path)
    return None if "both_pythons" not in config.option.markexpr or wanted else True


def _of_both_pythons(path: Path) -> bool:
    return f"{path.relative_to(HERE).as_posix()}/".startswith(tuple(f"{name}/" for name in BOTH_PYTHONS))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of ``BOTH_PYTHONS`` before marks select tests, and skip those that cannot hold on a device."""
    for item in items:
        if _of_both_pythons(item.path):
            item.add_marker("both_pythons")
        for mark in item.iter_markers("cpu_only"):
            reason = reason_of(mark, item.nodeid)
            if config.getoption("device") != "cpu":
                item.add_marker(pytest.mark.skip(reason=reason))


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


@pytest.fixture(scope="module", autouse=True)
def _no_world_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """End a world that the tests of a file have left, and warn of it: forks of this process would be in it."""
    yield
    if torch.distributed.is_initialized():
        from nxdpp import parallel_state

        warnings.warn(f"{request.path.relative_to(HERE)} leaves a world to the tests after it", stacklevel=1)
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
