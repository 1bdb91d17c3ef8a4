"""Ranks with other versions of torch or transformers are refused."""

from importlib import metadata
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, though not in its __all__
from torch.torch_version import TorchVersion

from nxdpp import parallel_state
from nxdpp.ranks.same_versions import check_same_versions
from tests.support.run_ranks import run_ranks


def test_the_difference_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(torch, "__version__", "2.9.0+cpu")
    monkeypatch.setattr(metadata, "version", lambda _: "4.57.0")
    for _ in range(2):
        check_same_versions(store)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(RuntimeError, match=r"^rank 3 has torch 2\.9\.0\+cpu, and rank 1 has torch 2\.9\.1\+cpu: "):
        check_same_versions(store)

    def absent(_: str) -> Any:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(RuntimeError, match=r"transformers 4\.57\.0, and .* transformers \(none\): .* on all hosts\."):
        check_same_versions(store)


def _initialize(rank: int) -> None:
    if rank:
        torch.__version__ = TorchVersion("1.0")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)


@pytest.mark.one_python
def test_a_start_with_other_versions_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"has torch 1\.0\b"):
        run_ranks(2, _initialize)
