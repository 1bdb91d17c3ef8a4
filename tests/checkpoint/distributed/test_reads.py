"""Reads in two phases: nothing in use changes before all is verified, and what has room is read once."""

from pathlib import Path

import pytest
import torch

from nxdpp.checkpoint.distributed.document import Document, parsed_document, read_document, tensors_of
from nxdpp.checkpoint.distributed.reads import VerifiedReads
from nxdpp.checkpoint.distributed.rectangles import TensorBlocks, whole
from nxdpp.checkpoint.files import pieces
from nxdpp.doors.nxd.checkpoint import save_checkpoint

SIZES = {"model.wide": 5 * 64, "model.narrow": 3 * 64 * 4, "model.one": 4}
NEW = {"model.wide"}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Document, dict[str, torch.Tensor]]:
    """A checkpoint of three tensors, one of them in many pieces."""
    model = torch.nn.Module()
    for name, tensor in {
        "wide": torch.arange(5 * 64, dtype=torch.uint8).view(5, 64),
        "narrow": torch.randn(64, 3),
        "one": torch.tensor(2.5),
    }.items():
        model.register_buffer(name, tensor)
    save_checkpoint(tmp_path, "tag", model)
    folder = tmp_path / "tag"
    values = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return folder, parsed_document(folder, read_document(folder)), values


@pytest.mark.parametrize("room", [10_000, SIZES["model.wide"] + SIZES["model.narrow"], SIZES["model.wide"], 0])
def test_what_has_room_is_read_once(
    room: int, saved: tuple[Path, Document, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, document, expected = saved
    assert {name: tensor.nbytes for name, tensor in expected.items()} == SIZES
    sizes = tensors_of(document.metadata)
    memory = {name: torch.zeros_like(expected[name]) for name in SIZES}
    tensors: dict[str, TensorBlocks] = {name: whole(memory[name]) for name in sizes if name in memory}
    count, read = 0, pieces.read_bytes

    def counted(descriptor: int, place: int, into: memoryview) -> int:
        nonlocal count
        count += len(into)
        return read(descriptor, place, into)

    monkeypatch.setattr(pieces, "read_bytes", counted)
    reads = VerifiedReads(folder, document.metadata, tensors, NEW, room)
    reads.verify()
    assert count == sum(SIZES.values())
    assert torch.equal(memory["model.wide"], expected["model.wide"])
    assert not any(memory[name].any() for name in SIZES.keys() - NEW)
    reads.apply()
    left = room - SIZES["model.wide"]
    again = 0
    for name in ("model.wide", "model.narrow", "model.one"):
        if name not in NEW and SIZES[name] > left:
            again += SIZES[name]
        elif name not in NEW:
            left -= SIZES[name]
    assert count == sum(SIZES.values()) + again
    assert all(torch.equal(memory[name], expected[name]) for name in SIZES)
