"""Files of a directory: a link is not followed, and a rank that cannot write still gathers with the others."""

from pathlib import Path

import pytest
import torch

from nxdpp.checkpoint.huggingface import write_directory
from nxdpp.checkpoint.huggingface.read_directory import UNFINISHED
from nxdpp.checkpoint.huggingface.write_directory import SavedDirectory, Shard, start_save


def test_a_link_in_the_place_of_the_unfinished_folder_is_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    out = tmp_path / "out"
    out.mkdir()
    (out / UNFINISHED).symlink_to(precious)
    start_save(out, is_adapter=False)
    assert not (out / UNFINISHED).is_symlink()
    assert (precious / "file").read_text() == "kept"


def test_a_rank_that_cannot_write_gathers_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tensors_of`` is collective: the other ranks of the tensor group would wait for it."""
    shards = [Shard(0), Shard(0), Shard(0)]
    gathered: list[Shard] = []

    def tensors_of(shard: Shard) -> dict[str, torch.Tensor]:
        gathered.append(shard)
        return {}

    def write_shard(path: Path, tensors: object) -> None:
        raise OSError(f"no space for {path.name}")

    monkeypatch.setattr(write_directory, "write_shard", write_shard)
    with pytest.raises(OSError, match="no space for model-00001-of-00003"):
        SavedDirectory(tmp_path, shards).write(0, tensors_of, 0)
    assert gathered == shards
