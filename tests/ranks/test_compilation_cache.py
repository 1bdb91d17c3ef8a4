"""``compilation_cache`` is refused before anything is started, unless it can be honoured."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nxdpp import parallel_state
from nxdpp.ranks.start_checks import checked_folder


@pytest.mark.parametrize(
    ("given", "device", "error", "message"),
    [
        (7, "xla", TypeError, "compilation_cache=7 must be the path of a folder"),
        ("cache", "cpu", ValueError, "is for device='xla', and device='cpu' compiles no graphs: leave it out"),
        (f"{__file__}/cache", "xla", ValueError, "must be a folder, and .*test_compilation_cache.py is a file"),
    ],
)
def test_an_argument_that_cannot_be_honoured_starts_nothing(
    given: Any, device: str | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        parallel_state.initialize_model_parallel(device=device, compilation_cache=given)
    assert not dist.is_initialized()


def test_a_folder_may_be_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert checked_folder("new/cache", "xla") == tmp_path / "new" / "cache"
    assert checked_folder(tmp_path, "xla") == tmp_path
    assert checked_folder(None, "cpu") is None
    assert not (tmp_path / "new").exists()
