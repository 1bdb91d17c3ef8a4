"""Files with checksums: values come back to the bit, and each damaged byte is found by the file's name."""

import errno
import itertools
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nxdpp.checkpoint.files import checksummed_writer, pieces
from nxdpp.checkpoint.files.checksummed_reader import ChecksummedReader, DamagedFile
from nxdpp.checkpoint.files.checksummed_writer import write_checksummed, write_shard, write_streamed
from nxdpp.checkpoint.files.pieces import FileSpan, layouts_of, read_region

DTYPES = list(checksummed_writer._NAMES)


@pytest.fixture(autouse=True, params=[0, 64, 65], ids=["threads", "threads for whole pieces", "no threads"])
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64)
    monkeypatch.setattr(pieces, "SMALL_BYTES", request.param)
    monkeypatch.setattr(checksummed_writer, "_BEHIND_BYTES", 100)


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


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float4_e2m1fn_x2])
def test_a_dtype_that_a_checkpoint_lacks_is_refused_before_a_file_is_made(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"weight is of {dtype}, which a checkpoint cannot hold: convert it first"):
        write_checksummed(tmp_path / "one", {"weight": torch.zeros(2, dtype=dtype)})
    assert list(tmp_path.iterdir()) == []


def test_a_stream_is_that_of_its_plan(tmp_path: Path) -> None:
    planned = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(AssertionError, match="missing"):
        write_streamed(tmp_path / "one", layouts_of(planned), [("a", planned["a"])])
    with pytest.raises(AssertionError, match="as planned"):
        write_streamed(tmp_path / "two", layouts_of(planned), [("b", planned["b"])])


@pytest.mark.parametrize("shape", [(9, 4), (3, 40), (2, 3, 30), (4, 5, 2), (50,), (2, 2, 2, 20)])
@pytest.mark.parametrize("kind", ["plain", "transposed", "other dtype"])
@pytest.mark.parametrize("shortest", [1, 16, 4096])
def test_each_rectangle_is_read(
    shape: tuple[int, ...], kind: str, shortest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are smaller than a piece, or larger: a piece has 16 numbers. Runs in rows are read, or whole rows."""
    monkeypatch.setattr(pieces, "SHORTEST_RUN", shortest)
    whole = values(torch.int16, *shape).float()
    span = write_checksummed(tmp_path / "one", {"before": torch.ones(3), "whole": whole})["whole"]
    ends = [sorted({(0, size), (size // 2, size), (1, size), (0, 1)}) for size in shape]
    with ChecksummedReader(tmp_path) as reader:
        for ranges in itertools.product(*ends):
            expected = whole[tuple(slice(*each) for each in ranges)]
            destination = torch.zeros(expected.shape)
            if kind == "transposed":
                order = list(range(destination.ndim))[::-1]
                destination = torch.zeros(expected.shape[::-1]).permute(order)
            if kind == "other dtype":
                destination = destination.double()
            offsets = [first for first, _ in ranges]
            read_region(partial(reader.read, span), shape, torch.float32, offsets, destination, reader.wait)
            reader.wait()
            assert torch.equal(destination.float(), expected), ranges


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Mapping[str, torch.Tensor], dict[str, FileSpan]]:
    tensors = {"first": values(torch.float32, 5, 7), "second": values(torch.bfloat16, 33)}
    return tmp_path / "rank00003", tensors, write_checksummed(tmp_path / "rank00003", tensors)


Written = tuple[Path, Mapping[str, torch.Tensor], dict[str, FileSpan]]


def test_each_flipped_byte_is_found(written: Written) -> None:
    file, tensors, spans = written
    whole = file.read_bytes()
    for name, span in spans.items():
        for at in range(span.start, span.start + span.length):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(DamagedFile, match="rank00003 is damaged: bytes"):
                read(file.parent, span, tensors[name])
            with ChecksummedReader(file.parent) as reader, pytest.raises(DamagedFile, match="rank00003"):
                reader.verify(span)
    file.write_bytes(whole)
    for name, span in spans.items():
        assert is_same(read(file.parent, span, tensors[name]), tensors[name])


def test_each_truncation_is_found(written: Written) -> None:
    file, tensors, spans = written
    whole = file.read_bytes()
    for size in range(len(whole) - 1, -1, -5):
        file.write_bytes(whole[:size])
        for name, span in spans.items():
            if size < span.start + span.length:
                with pytest.raises(DamagedFile, match=f"rank00003 is truncated: it has {size} bytes"):
                    read(file.parent, span, tensors[name])
            else:
                assert is_same(read(file.parent, span, tensors[name]), tensors[name])


def test_the_disk_begins_before_the_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[int, int]] = []
    advise = os.posix_fadvise

    def noted(descriptor: int, start: int, length: int, advice: int) -> None:
        assert os.fstat(descriptor).st_size >= start + length, "the bytes are in the page cache"
        begun.append((start, start + length))
        advise(descriptor, start, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", noted)
    tensors = {"large": values(torch.float32, 3, 40), "other": values(torch.float32, 30)}
    spans = write_checksummed(tmp_path / "one", tensors)
    assert begun[0][0] == 0
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(begun))
    assert begun[-1][1] > spans["other"].start
    assert is_same(load_file(tmp_path / "one")["large"], tensors["large"])


def test_a_small_rectangle_is_compared_with_its_pieces_alone(written: Written) -> None:
    file, tensors, spans = written
    whole = bytearray(file.read_bytes())
    whole[spans["first"].start] ^= 1
    file.write_bytes(whole)
    last = torch.zeros(1, 7)
    with ChecksummedReader(file.parent) as reader:
        read_region(partial(reader.read, spans["first"]), (5, 7), torch.float32, (4, 0), last)
    assert is_same(last, tensors["first"][4:])


def test_a_missing_file_and_one_that_the_disk_does_not_give_are_damaged(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, tensors, spans = written

    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(DamagedFile, match=r"rank00003 cannot be read .*Input/output error"):
            read(file.parent, spans["first"], tensors["first"])
    file.unlink()
    with pytest.raises(DamagedFile, match="rank00003 is missing"):
        read(file.parent, spans["first"], tensors["first"])
