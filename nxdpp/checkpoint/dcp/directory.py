"""Files of torch.distributed.checkpoint (DCP): names, shapes and the places of pieces, and the values of a tensor.

::

    path/.metadata        a pickle: shape and dtype of each tensor, the pieces of it, and the place of each piece
    path/__0_0.distcp     pieces, each as ``torch.save`` writes a tensor; and pickles of other values

The pickles may come from elsewhere, and no code of theirs runs. ``.metadata`` becomes objects without methods: of
torch's classes only the names are known. Pieces and other values are loaded with ``weights_only=True``.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch

from nxdpp.checkpoint.distributed.directory import METADATA, SUFFIX
from nxdpp.checkpoint.distributed.document_checks import check_cover
from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.checkpoint.files.pieces import StoredLayout, listed, printable
from nxdpp.checkpoint.files.torch_saves import SavedSpan, first_line
from nxdpp.ground.torch_names import LAYOUT, MEMORY_FORMATS, STORAGE_INFO

_OF_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    (_OF_METADATA, "Metadata"),
    (_OF_METADATA, "MetadataIndex"),
    (_OF_METADATA, "TensorStorageMetadata"),
    (_OF_METADATA, "BytesStorageMetadata"),
    (_OF_METADATA, "ChunkStorageMetadata"),
    (_OF_METADATA, "TensorProperties"),
    (_OF_METADATA, "StorageMeta"),
    (_OF_METADATA, MEMORY_FORMATS.name),
    ("torch.distributed.checkpoint.filesystem", STORAGE_INFO.name),
}
"""The classes of the objects in ``.metadata``."""
_PATHS = ("pathlib", "pathlib._local")


class DcpPiece(NamedTuple):
    """A rectangle of a tensor, and its bytes ``start`` to ``start + length`` of a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    start: int
    length: int

    @property
    def saved(self) -> SavedSpan:
        """The place of the bytes in the file."""
        return SavedSpan(self.path.name, self.start, self.length)


class DcpObject(NamedTuple):
    """A value that is no tensor: a number, a string, or containers of them."""

    name: str
    piece: DcpPiece

    def read(self) -> Any:
        """Return the value. Raises ``DamagedFile`` for any other, whose pickle would run code, and ``OSError``."""
        return self.piece.saved.load(self.piece.path.parent, self.name)


@dataclass(frozen=True)
class DcpTensor(StoredLayout):
    """A tensor in pieces, which have each element once."""

    name: str
    pieces: tuple[DcpPiece, ...]

    def read(self) -> torch.Tensor:
        """Return the values. Raises ``DamagedFile``, and ``OSError`` for a file that cannot be read."""
        if len(self.pieces) == 1:
            return self._loaded(self.pieces[0]).contiguous()
        values = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        for piece in self.pieces:
            region = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.sizes, strict=True))
            values[region] = self._loaded(piece)
        return values

    def has_values_of(self, other: "DcpTensor") -> bool:
        """Return whether ``other`` has the same shape, dtype and bits; both are read."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        return torch.equal(*(each.read().reshape(-1).view(torch.uint8) for each in (self, other)))

    def check_headers(self) -> None:
        """Raise ``DamagedFile`` for a piece whose header is damaged or does not fit; values are not read."""
        for piece in self.pieces:
            self._loaded(piece, with_values=False)

    def _loaded(self, piece: DcpPiece, with_values: bool = True) -> torch.Tensor:
        return piece.saved.tensor(piece.path.parent, self.name, piece.sizes, self.dtype, with_values)


class DcpDirectory(NamedTuple):
    """The content of a directory: tensors by name, and entries that are not tensors.

    ``keys`` has for a name the keys of the nested dicts that were saved; by default it is one key.
    """

    tensors: dict[str, DcpTensor]
    others: dict[str, DcpObject]
    keys: Mapping[str, tuple[str, ...]]

    def model(self, plain: bool = False) -> dict[str, DcpTensor]:
        """The tensors of the model by its names: the ones under a key ``model``, or else the ones under no key.

        Raises ``ValueError`` for several models. Also with ``plain`` where all but numbers are under other keys: no
        configuration tells which are the model's.
        """
        keys = {name: self.keys.get(name, (name,)) for name in self.tensors}
        found = {each[: at + 1] for each in keys.values() for at, key in enumerate(each[:-1]) if key == "model"}
        outer = [each for each in found if len(each) == min(map(len, found))]
        if len(outer) > 1:
            raise ValueError(f"there are several models: {', '.join(sorted(map('.'.join, outer)))}.")
        if outer:
            depth = len(outer[0])
            names = {name: ".".join(each[depth:]) for name, each in keys.items() if each[:depth] == outer[0]}
        else:
            names = {name: name for name, each in keys.items() if len(each) == 1}
            if plain and not any(self.tensors[name].shape for name in names):
                first = sorted({each[0] for each in keys.values()})
                raise ValueError(
                    f"--plain takes the tensors under a key model, or under no key, and the keys are "
                    f"{listed(first, 5)}. Save the module's state dict as model."
                )
            names = names or {name: name for name in keys}
        return {own: self.tensors[name] for name, own in names.items()}


def has_dcp_files(path: Path) -> bool:
    """Return whether ``path`` is a directory of torch.distributed.checkpoint.

    Raises ``DamagedFile`` for an unfinished one.
    """
    if (path / METADATA).is_file():
        return True
    if any(path.glob(f"*{SUFFIX}")):
        raise DamagedFile(f"{path} is unfinished: {METADATA} of torch.distributed.checkpoint is missing.")
    return False


def read_dcp_directory(path: Path) -> DcpDirectory:
    """Return the content of the directory ``path``, without values.

    Raises ``DamagedFile`` for a damaged ``.metadata``, one that has anything but descriptions, and missing files or
    files that are too short; ``OSError`` for files that cannot be read.
    """
    file = path / METADATA
    content = file.read_bytes()
    try:
        found = _Unpickler(io.BytesIO(content)).load()
        tensors, others, keys = _described(found, path)
    except Exception as error:
        # A damaged pickle raises any type.
        raise DamagedFile(
            f"{file} is not of torch.distributed.checkpoint, or is damaged ({type(error).__name__}: "
            f"{first_line(error)})."
        ) from error
    lengths: dict[Path, int] = {}
    pieces = [(each.name, piece) for each in tensors.values() for piece in each.pieces]
    for name, piece in (*pieces, *((each.name, each.piece) for each in others.values())):
        if piece.path not in lengths:
            lengths[piece.path] = piece.path.stat().st_size if piece.path.is_file() else -1
        length = lengths[piece.path]
        if length < piece.start + piece.length:
            state = f"has {length:,} bytes" if length >= 0 else "is missing"
            raise DamagedFile(
                f"{piece.path} {state}, and {printable(name, 300)} is in bytes {piece.start:,} to "
                f"{piece.start + piece.length:,} of it: copy the directory again."
            )
    return DcpDirectory(tensors, others, keys)


class _Pickled:
    """Object in the place of one of a class of torch: only the state that was pickled."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Reader of containers, numbers, strings, dtypes, and for each class that is admitted an object without its code.

    The classes are made anew, because a pickle can set attributes of what ``find_class`` returns.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._made: dict[tuple[str, str], type] = {each: type(each[1], (_Pickled,), {}) for each in _CLASSES}

    def find_class(self, module: str, name: str) -> Callable[..., Any] | torch.dtype:
        """Return what stands for ``name`` of ``module``."""
        if (module, name) in self._made:
            return self._made[module, name]
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if (module, name) == ("torch.serialization", LAYOUT.name):
            return lambda layout: layout
        if module in _PATHS and name in ("PosixPath", "WindowsPath"):
            return lambda *parts: PurePath(*parts)
        raise pickle.UnpicklingError(f"it names {printable(module)}.{printable(name)}, which is not called")


_Content = tuple[dict[str, DcpTensor], dict[str, DcpObject], dict[str, tuple[str, ...]]]


def _described(metadata: Any, path: Path) -> _Content:
    """The tensors, other values, and keys in ``metadata``; raises many types for what torch does not write."""
    described, stored = _state(metadata, "Metadata")["state_dict_metadata"], metadata.state["storage_data"]
    places = {}
    for index, info in stored.items():
        at = _state(index, "MetadataIndex")
        places[at["fqn"], tuple(at.get("offset") or ())] = _state(info, "_StorageInfo")
    tensors, others = {}, {}
    for name, each in described.items():
        if type(name) is not str:
            raise ValueError(f"a name is {name!r:.100}")
        if type(each).__name__ == "BytesStorageMetadata":
            others[name] = DcpObject(name, _piece(name, (), (), places[name, ()], path))
            continue
        saved = _state(each, "TensorStorageMetadata")
        dtype, shape = _state(saved["properties"], "TensorProperties")[0], _numbers(saved["size"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has the dtype {dtype!r:.100}")
        pieces = []
        for chunk in saved["chunks"]:
            block = _state(chunk, "ChunkStorageMetadata")
            offsets, sizes = _numbers(block["offsets"]), _numbers(block["sizes"])
            if all(sizes):
                pieces.append(_piece(name, offsets, sizes, places[name, offsets], path))
        if all(shape):
            check_cover(name, shape, [each[:2] for each in pieces])
        tensors[name] = DcpTensor(shape, dtype, name, tuple(pieces))
    planned = metadata.state.get("planner_data")
    # The default planner has a dict.
    keys = planned if isinstance(planned, dict) else {}
    return tensors, others, {name: tuple(map(str, each)) for name, each in keys.items()}


def _piece(
    name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], info: Mapping[str, Any], path: Path
) -> DcpPiece:
    file, (start, length) = info["relative_path"], _numbers((info["offset"], info["length"]))
    if info.get("transform_descriptors"):
        raise ValueError(f"{name} is transformed by {info['transform_descriptors']!r:.100}, which is not read here")
    if type(file) is not str or not file.isprintable() or Path(file).name != file:
        raise ValueError(f"{name} is in the file {file!r:.100}")
    return DcpPiece(offsets, sizes, path / file, start, length)


def _state(value: Any, kind: str) -> Any:
    if type(value).__name__ != kind or not isinstance(value, _Pickled):
        raise ValueError(f"a {type(value).__name__} is in the place of {kind}")
    return value.state


def _numbers(values: Any) -> tuple[int, ...]:
    if any(type(each) is not int or not 0 <= each < 2**63 for each in values):
        raise ValueError(f"sizes or places are {values!r:.100}")
    return tuple(values)
