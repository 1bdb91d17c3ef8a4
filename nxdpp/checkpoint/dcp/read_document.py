"""A directory that torch.distributed.checkpoint wrote, as the document of a checkpoint.

``load_checkpoint`` then reads it as any other: each rank the rectangles that it needs. It has no checksums.
"""

import warnings
from collections.abc import Mapping
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

from nxdpp.checkpoint.dcp.directory import DcpTensor, read_dcp_directory
from nxdpp.checkpoint.dcp.optimizer_entries import found_optimizer
from nxdpp.checkpoint.distributed.document import OF_MODEL, Document, tensors_of
from nxdpp.checkpoint.distributed.document_checks import check_content
from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.checkpoint.files.checksummed_writer import check_dtype
from nxdpp.checkpoint.files.pieces import listed
from nxdpp.checkpoint.files.torch_saves import SavedSpan

EMPTY: Mapping[str, Any] = dict.fromkeys(("layout", "configuration", "optimizer", "scheduler", "grad_scaler"))


def dcp_document(path: Path, with_optimizer: bool) -> Document:
    """Return the document of the model in ``path``, and of its optimizer ``with_optimizer``.

    A tied tensor is there under each of its names.

    Raises ``DamagedFile`` for a damaged directory, ``ValueError`` for state that no checkpoint of nxdpp has, and
    ``OSError``.
    """
    directory = read_dcp_directory(path)
    try:
        model = directory.model()
        optimizer = found_optimizer(directory, model) if with_optimizer else None
        tensors = {f"{OF_MODEL}{name}": each for name, each in model.items()}
        tensors |= {} if optimizer is None else optimizer.tensors
        for name, each in tensors.items():
            check_dtype(name, each.dtype)
        content = {**EMPTY, "ties": {}, "random": [], "user_content": None}
        if optimizer is not None:
            content["optimizer"] = optimizer.content
            others = {*directory.tensors, *directory.others} - {each.name for each in model.values()}
            left = sorted(others.difference(optimizer.entries))
            if left:
                warnings.warn(
                    f"{path} has {listed(left, 5)}, of neither model nor optimizer, which are not loaded: read them by "
                    f"torch.distributed.checkpoint.load.",
                    stacklevel=2,
                )
        document = Document(content, metadata_of(tensors))
        check_content(content, tensors_of(document.metadata))
    except DamagedFile:
        raise
    except ValueError as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from error
    return document


def metadata_of(tensors: Mapping[str, DcpTensor]) -> Metadata:
    """Return the rectangles of ``tensors`` by name, and the place of each."""
    described: dict[str, Any] = {}
    spans: dict[MetadataIndex, SavedSpan] = {}
    for name, each in tensors.items():
        chunks = []
        for piece in each.pieces:
            chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)))
            spans[MetadataIndex(name, chunks[-1].offsets)] = piece.saved
        properties = TensorProperties(dtype=each.dtype)
        described[name] = TensorStorageMetadata(properties, torch.Size(each.shape), chunks)
    return Metadata(state_dict_metadata=described, storage_data=spans)


def check_copies(path: Path, ties: Mapping[str, str]) -> None:
    """Raise ``ValueError`` where ``path`` has different values of tied tensors; ``ties`` gives the first name of each.

    The tensors are read whole, one pair at a time.
    """
    model = read_dcp_directory(path).model() if ties else {}
    for name, first in ties.items():
        if name in model and first in model and not model[name].has_values_of(model[first]):
            raise ValueError(
                f"{name} and {first} differ in {path}, and are one tensor of the model: wrap a model that does not "
                f"tie them. Nothing was loaded."
            )
