"""Compiled graphs in a folder: torch_xla writes them, PJRT's CPU device cannot load them, and both are told."""

import logging
from pathlib import Path

import pytest
import torch

from nxdpp import parallel_state
from nxdpp.devices import kept_graphs
from nxdpp.devices.kinds import device_of
from tests.support.xla_ranks import run_xla_ranks


def _refused(rank: int, folder: str) -> str:
    with pytest.raises(RuntimeError) as refused:
        parallel_state.initialize_model_parallel(device="xla", compilation_cache=folder)
    assert not torch.distributed.is_initialized()
    # The remedy.
    parallel_state.initialize_model_parallel(device="xla")
    return str(refused.value)


def _computed(rank: int, folder: str) -> tuple[float, list[str]]:
    """As on a device that is not known to be unable: a result, and the warnings."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]  # replaced for the test
    logging.getLogger(kept_graphs.__name__).addHandler(handler)
    kept_graphs.LOADS_NO_GRAPHS.clear()
    for _ in range(2):
        parallel_state.initialize_model_parallel(device="xla", compilation_cache=folder)
    device = parallel_state.local_device()
    total = (torch.arange(8.0).to(device) * 1.5).sin().sum()
    device_of(device).submit()
    with pytest.raises(RuntimeError, match="Give that folder"):
        parallel_state.initialize_model_parallel(device="xla", compilation_cache=f"{folder}/other")
    return total.item(), warnings


def test_the_cpu_device_is_refused(tmp_path: Path) -> None:
    (message,) = run_xla_ranks(1, _refused, str(tmp_path / "cache"))
    assert "cannot load them" in message
    assert not (tmp_path / "cache").exists()


def test_graphs_are_written_and_one_that_cannot_be_loaded_warns(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    ((first, no_warnings),) = run_xla_ranks(1, _computed, str(folder))
    assert len(list(folder.iterdir())) == 1
    ((second, warnings),) = run_xla_ranks(1, _computed, str(folder))
    assert (first, no_warnings) == (second, [])
    (warning,) = warnings
    assert warning.startswith(f"compilation_cache='{folder}': PJRT's CPU device cannot load")
