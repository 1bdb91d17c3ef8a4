"""Files with checksums: values come back to the bit, and each damaged byte is found by the file's name."""

import errno
import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from nxdpp.checkpoint.files import checksummed_writer, pieces
from nxdpp.checkpoint.files.checksummed_reader import ChecksummedReader, DamagedFile
from nxdpp.checkpoint.files.checksummed_writer import write_checksummed, write_shard, write_streamed
from nxdpp.checkpoint.files.pieces import FileSpan, layouts_of, read_region

DTYPES = list(checksummed_writer._NAMES)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    set_pieces(monkeypatch, 64)


def set_pieces(patch: pytest.MonkeyPatch, small_bytes: int) -> None:
    """Pieces of 64 bytes; threads read those of ``small_bytes`` or more."""
    patch.setattr(pieces, "PIECE_BYTES", 64)
    patch.setattr(pieces, "SMALL_BYTES", small_bytes)
    patch.setattr(checksummed_writer, "_BEHIND_BYTES", 100)


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(count)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    drawn = torch.randint(0, 256, (max(1, count),), generator=generator, dtype=torch.uint8)
    return drawn[:count].view(dtype).view(shape)


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def read(folder: Path, span: FileSpan, like: torch.Tensor) -> torch.Tensor:
    destination = torch.zeros_like(like)
    with ChecksummedReader(folder) as reader:
        read_region(partial(reader.read, span), like.shape, like.dtype, (0,) * like.ndim, destination, reader.wait)
    return destination


def test_tensors_of_all_dtypes_come_back_and_safetensors_reads_them(tmp_path: Path) -> None:
    tensors = {f"{dtype}": values(dtype, 5, 7) for dtype in DTYPES}
    tensors |= {"empty": torch.empty(0, 3), "number": torch.tensor(2.5), "large": values(torch.float32, 3, 40)}
    file = tmp_path / "one.safetensors"
    spans = write_streamed(file, layouts_of(tensors), tensors.items(), packed=True)
    for name, tensor in tensors.items():
        assert spans[name].length == tensor.nbytes
        assert len(spans[name].checksums) == -(-tensor.nbytes // 64)
        assert is_same(read(tmp_path, spans[name], tensor), tensor), name
    write_shard(tmp_path / "shard", tensors)
    for loaded in (load_file(file), load_file(tmp_path / "shard")):
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert is_same(loaded[name], tensor), name


def test_tensors_that_are_not_contiguous_are_written_in_their_order(tmp_path: Path) -> None:
    base = values(torch.float32, 6, 10)
    number = torch.complex(values(torch.int16, 4).float(), torch.ones(4))
    tensors = {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "conjugate": number.conj(),
        "part": base[2:4],
        "one": base[0, ::2][:1],
    }
    write_checksummed(tmp_path / "one", tensors)
    for name, tensor in load_file(tmp_path / "one").items():
        assert torch.equal(tensor, tensors[name]), name


def test_a_dtype_that_a_checkpoint_lacks_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    for dtype in (torch.complex128, torch.float4_e2m1fn_x2):
        with pytest.raises(ValueError, match=f"weight is of {dtype}, which a checkpoint cannot hold: convert it first"):
            write_checksummed(tmp_path / "one", {"weight": torch.zeros(2, dtype=dtype)})
    assert list(tmp_path.iterdir()) == []


PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


@PROPERTY
@given(
    draw=st.data(),
    shape=st.sampled_from([(9, 4), (3, 40), (2, 3, 30), (4, 5, 2), (50,), (2, 2, 2, 20)]),
    kind=st.sampled_from(["plain", "transposed", "other dtype"]),
    shortest=st.sampled_from([1, 16, 4096]),
    small=st.sampled_from([0, 64, 65]),
)
def test_each_rectangle_is_read(
    draw: st.DataObject, shape: tuple[int, ...], kind: str, shortest: int, small: int
) -> None:
    """Rows are smaller than a piece, or larger: a piece has 16 numbers. Runs in rows are read, or whole rows."""
    ends = [(first, draw.draw(st.integers(first + 1, size))) for size in shape
            for first in [draw.draw(st.integers(0, size - 1))]]  # fmt: skip
    whole = values(torch.int16, *shape).float()
    expected = whole[tuple(slice(*each) for each in ends)]
    destination = torch.zeros(expected.shape)
    if kind == "transposed":
        destination = torch.zeros(expected.shape[::-1]).permute(list(range(expected.ndim))[::-1])
    if kind == "other dtype":
        destination = destination.double()
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        set_pieces(patch, small)
        patch.setattr(pieces, "SHORTEST_RUN", shortest)
        span = write_checksummed(Path(folder) / "one", {"before": torch.ones(3), "whole": whole})["whole"]
        with ChecksummedReader(Path(folder)) as reader:
            offsets = [first for first, _ in ends]
            read_region(partial(reader.read, span), whole.shape, torch.float32, offsets, destination, reader.wait)
            reader.wait()
    assert torch.equal(destination.float(), expected)


TENSORS = {"first": values(torch.float32, 5, 7), "second": values(torch.bfloat16, 33)}


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, FileSpan]]:
    return tmp_path / "rank00003", write_checksummed(tmp_path / "rank00003", TENSORS)


Written = tuple[Path, dict[str, FileSpan]]


@PROPERTY
@given(small=st.sampled_from([0, 64, 65]), part=st.floats(0.0, 0.9999), change=st.integers(0, 255))
def test_each_changed_byte_and_each_truncation_is_found(small: int, part: float, change: int) -> None:
    """``change`` 0 cuts the file there. What is not touched is read."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        set_pieces(patch, small)
        file = Path(folder) / "rank00003"
        spans = write_checksummed(file, TENSORS)
        whole = file.read_bytes()
        at = spans["first"].start + int(part * (len(whole) - spans["first"].start))
        file.write_bytes(whole[:at] + (bytes([whole[at] ^ change]) + whole[at + 1 :] if change else b""))
        for name, span in spans.items():
            end = span.start + span.length
            if span.start <= at < end or (not change and at < end):
                text = "rank00003 is damaged: bytes" if change else f"rank00003 is truncated: it has {at} bytes"
                with pytest.raises(DamagedFile, match=text):
                    read(file.parent, span, TENSORS[name])
                with ChecksummedReader(file.parent) as reader, pytest.raises(DamagedFile, match="rank00003"):
                    reader.verify(span)
            else:
                assert is_same(read(file.parent, span, TENSORS[name]), TENSORS[name])


def test_a_missing_file_and_one_that_the_disk_does_not_give_are_damaged(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, spans = written

    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(DamagedFile, match=r"rank00003 cannot be read .*Input/output error"):
            read(file.parent, spans["first"], TENSORS["first"])
    file.unlink()
    with pytest.raises(DamagedFile, match="rank00003 is missing"):
        read(file.parent, spans["first"], TENSORS["first"])
