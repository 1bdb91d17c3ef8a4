"""Files of ranks: tensors of all strides are read by position, and are written as torch.load reads them."""

from pathlib import Path

import pytest
import torch

from nxdpp.checkpoint.files.pieces import layouts_of
from nxdpp.checkpoint.files.rank_file import KEY, RankFile, make_file

BASE = torch.arange(12.0).view(3, 4)
TENSORS = {
    "whole": BASE,
    "transposed": BASE.t(),
    "view": BASE[1:, 2:],
    "half": torch.ones(5, dtype=torch.bfloat16),
    "number": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
}


def test_tensors_of_torch_save_are_read(tmp_path: Path) -> None:
    torch.save({KEY: TENSORS}, tmp_path / "file.pt")
    file = RankFile(tmp_path / "file.pt")
    assert file.layouts == layouts_of(TENSORS)
    for name, expected in TENSORS.items():
        assert torch.equal(file.read(name), expected), name


def test_torch_load_reads_what_is_written(tmp_path: Path) -> None:
    file = make_file(tmp_path / "new" / "file.pt", layouts_of(TENSORS), KEY)
    for name, tensor in TENSORS.items():
        file.write(name, tensor)
    file.flush()
    loaded = torch.load(tmp_path / "new" / "file.pt", weights_only=True)[KEY]
    for name, expected in TENSORS.items():
        assert torch.equal(loaded[name], expected), name


def test_the_format_of_an_old_torch_names_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({KEY: {"whole": BASE}}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"file\.pt is damaged, or not of torch\.save: .* please torch\.save your"):
        RankFile(path)
    torch.save(torch.load(path, weights_only=True), path)
    assert torch.equal(RankFile(path).read("whole"), BASE)
