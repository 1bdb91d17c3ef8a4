"""Checks of a document: it has the parts that a save writes, and the rectangles of each tensor cover it.

A checkpoint can come from elsewhere. Its document may have any JSON, and a load must not read, allocate or leave out
anything because of it. A document that passes can be loaded, so that ``verify`` refuses what a load refuses.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nxdpp.checkpoint.distributed.directory import SUFFIX
from nxdpp.checkpoint.distributed.structured import decoded, dtype_named
from nxdpp.checkpoint.files import pieces
from nxdpp.checkpoint.files.checksummed_writer import holds_dtype
from nxdpp.checkpoint.files.pieces import FileSpan
from nxdpp.counted import counted

DIGITS = 8
"""Hexadecimal digits of a checksum."""
_CHECKSUMS = re.compile(rf"([0-9a-f]{{{DIGITS}}})*")
_SUFFIXES = (".safetensors", SUFFIX)
_LONGEST_NAME = 255
_END = 2**63
_OF_GROUP = ("options", "names")
_NOT_OPTIONS = ("params", "param_names")
_PART = re.compile(r"random\.\d+|[^.\[]*")
_LAYOUT = ("ranks", "tensor", "data", "pipeline")
_STATES = ("device", "tracker")
_GENERATORS = {
    "python": {"$tuple": [0, {"$tensor": ""}, 0]},
    "numpy": {"$tuple": ["", {"$array": ""}, 0, 0, 0]},
    "torch": {"$tensor": ""},
}
"""Form of the states of random generators; numbers may differ."""
_MOST_DIVIDED = 8
"""Dimensions along which the rectangles of a tensor differ; a flat range of a kernel has 5."""


def metadata_of(tensors: Mapping[str, Any]) -> Metadata:
    """Return the description of ``tensors``, JSON of a document.

    Raises ``ValueError``, ``TypeError``, ``KeyError`` or ``AttributeError`` for what no save writes.
    """
    described: dict[str, Any] = {}
    spans: dict[MetadataIndex, FileSpan] = {}
    for name, tensor in tensors.items():
        dtype, shape = dtype_named(tensor["dtype"]), _numbers(tensor["shape"], f"the shape of {name}")
        if not holds_dtype(dtype) or prod(shape) * dtype.itemsize >= _END:
            raise ValueError(f"{name} has {dtype} and shape {list(shape)!r:.100}, which no file has")
        chunks = []
        for block in tensor["blocks"]:
            offsets, sizes = (_numbers(block[key], f"{key} of a block of {name}") for key in ("offsets", "sizes"))
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            spans[MetadataIndex(name, chunks[-1].offsets)] = _span(name, block, prod(sizes) * dtype.itemsize)
        check_cover(name, shape, [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks])
        described[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
    return Metadata(state_dict_metadata=described, storage_data=spans)


def _span(name: str, block: Mapping[str, Any], length: int) -> FileSpan:
    file, start, text = block["file"], block["start"], block["checksums"]
    is_name = isinstance(file, str) and file.isprintable() and Path(file).name == file and file.endswith(_SUFFIXES)
    if not is_name or len(file.encode()) > _LONGEST_NAME:
        raise ValueError(f"a block of {name} is in the file {file!r:.100}")
    if type(start) is not int or not 0 <= start < _END - length:
        raise ValueError(f"a block of {name} begins at byte {start!r:.100}")
    count = -(-length // pieces.PIECE_BYTES)
    if not isinstance(text, str) or not _CHECKSUMS.fullmatch(text) or len(text) != count * DIGITS:
        raise ValueError(f"a block of {name} has checksums {text!r:.100} for {length} bytes")
    return FileSpan(file, start, length, tuple(int(text[at : at + DIGITS], 16) for at in range(0, len(text), DIGITS)))


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(each) is not int or not 0 <= each < _END for each in value):
        raise ValueError(f"{what} is {value!r:.100}")
    return tuple(value)


_Rectangle = tuple[tuple[int, ...], tuple[int, ...]]


def check_cover(name: str, shape: tuple[int, ...], blocks: Sequence[_Rectangle]) -> None:
    """Raise ``ValueError`` unless each element of ``shape`` is in exactly one of ``blocks``."""
    if len(blocks) == 1 and blocks[0] == ((0,) * len(shape), shape):
        return
    for offsets, sizes in blocks:
        are_inside = len(offsets) == len(sizes) == len(shape) and all(
            first + size <= whole for first, size, whole in zip(offsets, sizes, shape, strict=True)
        )
        if not are_inside:
            raise ValueError(f"a block of {name} at {list(offsets)} of {list(sizes)} is outside of {list(shape)}")
    divided = [dim for dim, whole in enumerate(shape) if any(sizes[dim] != whole for _, sizes in blocks)]
    if len(divided) > _MOST_DIVIDED:
        raise ValueError(f"the blocks of {name} divide it along {counted(len(divided), 'dimension')}")
    # Rectangles cover the whole exactly once where their corners, with signs, are those of the whole.
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, (offsets, sizes) in [*((1, block) for block in blocks), (-1, ((0,) * len(shape), shape))]:
        for ends in product((0, 1), repeat=len(divided)):
            corner = tuple(offsets[dim] + end * sizes[dim] for dim, end in zip(divided, ends, strict=True))
            corners[corner] += sign * (-1) ** sum(ends)
    if any(corners.values()):
        raise ValueError(f"the blocks of {name} do not have each element of {list(shape)} once")


def check_content(content: Any, tensors: Mapping[str, TensorStorageMetadata]) -> None:
    """Raise ``ValueError`` for ``content``, JSON of a document with ``tensors``, that no save writes."""
    _need(_has(content, "layout", "ties", "configuration", "optimizer", "random"), "content")
    _need(_has(content, "scheduler", "grad_scaler", "user_content"), "content")
    # A conversion has no layout, and no random states.
    layout = {"ranks": 0} if content["layout"] is None else content["layout"]
    _need(_are(layout, lambda value: type(value) is int), "layout")
    _need(content["layout"] is None or _has(layout, *_LAYOUT), "layout")
    # A conversion has no quantized weights.
    for key in ("ties", "configuration", "quantized"):
        _need(content.get(key) is None or _are(content[key], lambda value: isinstance(value, str)), key)
    parts: dict[str, dict[str, TensorStorageMetadata]] = defaultdict(dict)
    for name, saved in tensors.items():
        parts[part_of(name)][name] = saved
    for key in ("scheduler", "grad_scaler"):
        _need(content[key] is None or isinstance(_decoded(content[key], parts[key]), dict), key)
    _decoded(content["user_content"], parts["user_content"])
    _need(isinstance(content["random"], list) and len(content["random"]) == layout.get("ranks"), "random")
    for rank, states in enumerate(content["random"]):
        _need(_has(states, *_GENERATORS, *_STATES), "random")
        _need(_has_form({key: states[key] for key in _GENERATORS}, _GENERATORS), "random")
        _decoded(states, parts[f"random.{rank}"])
    if content["optimizer"] is not None:
        _check_optimizer(content["optimizer"], tensors)


def _check_optimizer(optimizer: Any, tensors: Mapping[str, TensorStorageMetadata]) -> None:
    _need(_has(optimizer, "class", "groups", "states") and isinstance(optimizer["class"], str), "optimizer")
    _need(isinstance(optimizer["groups"], list), "groups")
    for group in optimizer["groups"]:
        is_group = isinstance(group, dict) and tuple(group) == _OF_GROUP and isinstance(group["options"], dict)
        _need(is_group and not set(group["options"]) & set(_NOT_OPTIONS), "groups")
        decoded(group["options"])
        _need(isinstance(group["names"], list) and all(isinstance(name, str) for name in group["names"]), "groups")
    several = optimizer.get("several")
    if several is not None:
        are_several = _are(several, lambda each: _has(each, "class", "groups") and isinstance(each["class"], str))
        _need(bool(several) and are_several, "several")
        counts = _numbers([each["groups"] for each in several.values()], "the number of groups of an optimizer")
        _need(sum(counts) == len(optimizer["groups"]), "several")
    _need(_are(optimizer["states"], lambda state: _are(state, lambda value: isinstance(value, dict))), "states")
    for name, state in optimizer["states"].items():
        for key, described in state.items():
            if "tensor" not in described:
                number = described.get("number", ())
                _need(isinstance(number, int | float | None) or number in ("nan", "inf", "-inf"), "states")
                continue
            saved = tensors.get(f"optimizer.{name}.{key}")
            _need(saved is not None and described["tensor"] == str(saved.properties.dtype).removeprefix("torch."), key)
            _need(saved is not None and described.get("shape") in (None, list(saved.size)), key)


def part_of(name: str) -> str:
    """Return the part of the content that the tensor ``name`` is in, such as ``user_content`` or ``random.3``."""
    found = _PART.match(name)
    return found[0] if found is not None else ""


def _decoded(saved: Any, tensors: Mapping[str, TensorStorageMetadata]) -> Any:
    """The value of a part with ``tensors``, which have no memory of their own."""
    made = {name: torch.zeros((), dtype=each.properties.dtype, device="cpu") for name, each in tensors.items()}
    return decoded(saved, {name: value.expand(tensors[name].size) for name, value in made.items()})


def _has_form(saved: Any, form: Any) -> bool:
    """Return whether ``saved`` has the containers of ``form``; numbers may differ."""
    if isinstance(form, dict):
        return (
            isinstance(saved, dict)
            and saved.keys() == form.keys()
            and all(map(_has_form, saved.values(), form.values()))
        )
    if isinstance(form, list):
        return isinstance(saved, list) and len(saved) == len(form) and all(map(_has_form, saved, form))
    return isinstance(saved, str) == isinstance(form, str) and not isinstance(saved, dict | list)


def _has(value: Any, *keys: str) -> bool:
    return isinstance(value, dict) and all(key in value for key in keys)


def _are(value: Any, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(check, value.values()))


def _need(is_right: bool, part: str) -> None:
    if not is_right:
        raise ValueError(f"its part {part!r} is not as a save writes it")
