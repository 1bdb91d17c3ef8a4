"""Values that ``torch.save`` writes one after another: their places, and what is refused."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from nxdpp.checkpoint.files.checksummed_reader import ChecksummedReader, DamagedFile
from nxdpp.checkpoint.files.pieces import bytes_of
from nxdpp.checkpoint.files.torch_saves import SavedSpan, write_saved

VALUES: dict[str, Any] = {
    "matrix": torch.arange(12.0).view(3, 4),
    "view": torch.arange(1000)[500:510],
    "transposed": torch.arange(6).view(2, 3).t(),
    "number": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "names": ["a", "b"],
    "betas": (0.9, 0.999),
}


def test_each_value_and_its_elements_are_found(tmp_path: Path) -> None:
    places = write_saved(tmp_path / "file", VALUES.items())
    with ChecksummedReader(tmp_path) as reader:
        for name, (span, elements) in places.items():
            content = (tmp_path / "file").read_bytes()[span.start : span.start + span.length]
            found = torch.load(io.BytesIO(content), weights_only=True)
            value = VALUES[name]
            if not isinstance(value, torch.Tensor):
                assert elements is None
                assert found == span.load(tmp_path, name) == value
                continue
            assert elements is not None
            assert torch.equal(found, value)
            assert torch.equal(span.load(tmp_path, name), value)
            reader.verify(elements)
            assert span.values(tmp_path, name, value.shape, value.dtype) == elements._replace(checksums=())
            read = torch.empty(value.shape, dtype=value.dtype)
            reader.read(elements, 0, bytes_of(read))
            reader.wait()
            assert torch.equal(read, value)
    # A view is written without the rest of its memory.
    assert places["view"][0].length < 2000


@pytest.mark.parametrize(("shape", "dtype"), [((3, 4), torch.int32), ((4, 3), torch.float32), ((3, 5), torch.float32)])
def test_a_piece_of_another_shape_or_dtype_is_refused(
    shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    places = write_saved(tmp_path / "file", VALUES.items())
    with pytest.raises(
        DamagedFile, match=r"is of torch.float32 and shape \[3, 4\], and by .metadata of torch\..*: the fi"
    ):
        places["matrix"][0].values(tmp_path, "matrix", shape, dtype)


def test_what_is_no_contiguous_tensor_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        torch.save(VALUES["transposed"], file)
        length = file.tell()
    with pytest.raises(DamagedFile, match="is no contiguous tensor: python -m nxdpp checkpoint convert reads it"):
        SavedSpan("file", 0, length).values(tmp_path, "transposed", (3, 2), torch.int64)
    with pytest.raises(DamagedFile, match=r"the piece of short at byte 0 of .* is damaged, or not a tensor"):
        SavedSpan("file", 0, length - 50).load(tmp_path, "short")
