"""A process keeps its graphs in one folder, which it is given before its first computation."""

from pathlib import Path

import pytest

from nxdpp.devices.kept_graphs import KeptGraphs


class _TorchXla:
    def __init__(self, device_type: str = "TPU") -> None:
        self.folders: list[str] = []
        self.has_computed = False
        self.failures = 0
        self.kept = KeptGraphs(
            lambda: device_type, self.folders.append, lambda: self.has_computed, lambda: self.failures
        )


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_PERSISTENT_CACHE_PATH", raising=False)


def test_the_folder_is_made_and_given_once(tmp_path: Path) -> None:
    torch_xla = _TorchXla()
    torch_xla.kept.keep_in(tmp_path / "a" / "b")
    torch_xla.has_computed = True
    torch_xla.kept.keep_in(tmp_path / "a" / "b")
    assert torch_xla.folders == [str(tmp_path / "a" / "b")]
    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(RuntimeError, match=r"keeps its graphs in .*b\. Give that folder"):
        torch_xla.kept.keep_in(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_folder_that_torch_xla_cannot_take_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late, other, cpu = _TorchXla(), _TorchXla(), _TorchXla("CPU")
    late.has_computed = True
    with pytest.raises(RuntimeError, match=r"has computed in this process before.*at the start of the program"):
        late.kept.keep_in(tmp_path / "cache")
    with pytest.raises(RuntimeError, match=r"PJRT's CPU device .* cannot load them .* Leave compilation_cache out"):
        cpu.kept.keep_in(tmp_path / "cache")
    monkeypatch.setenv("XLA_PERSISTENT_CACHE_PATH", "/other")
    with pytest.raises(RuntimeError, match=r"XLA_PERSISTENT_CACHE_PATH names /other\. Leave one of them out"):
        other.kept.keep_in(tmp_path / "cache")
    assert (late.folders, other.folders, cpu.folders) == ([], [], [])
    assert not (tmp_path / "cache").exists()
