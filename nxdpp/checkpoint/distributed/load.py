"""A load of all ranks: each reads its own rectangles, whatever layout saved them.

::

    rank 0       reads the document ─▶ all ranks
    all ranks    verify names, shapes and groups ─▶ read into existing memory ─▶ send to replicas
    all ranks    take over the rest

A damaged checkpoint is named in a warning, and the next older one is loaded::

    step_30    damaged: its checksum differs on rank 2    all ranks: the next one
    step_20    whole: overwrites all that was read of step_30
"""

import errno
import logging
import socket
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from nxdpp.checkpoint.distributed.document import OF_MODEL, Document, parsed_document, read_document, tensors_of
from nxdpp.checkpoint.distributed.load_targets import LoadArguments, LoadTargets
from nxdpp.checkpoint.distributed.model_state import model_tensors
from nxdpp.checkpoint.distributed.optimizer_state import MASTER, held_state
from nxdpp.checkpoint.distributed.pruning import check_files, keep_damaged
from nxdpp.checkpoint.distributed.ranks import Exchange
from nxdpp.checkpoint.distributed.rectangles import TensorBlocks
from nxdpp.checkpoint.distributed.shared_reads import SharedReads
from nxdpp.checkpoint.files.checksummed_reader import ChecksummedReader, DamagedFile
from nxdpp.checkpoint.files.pieces import FileSpan, listed, read_region

_logger = logging.getLogger(__name__)

MIXED = "The model has values of two origins now: load another checkpoint, or end the program."


class Load:
    """One load. Its methods are collective over all ranks, in their order.

    Args:
        folder: directory of the checkpoint.
        exchange: of all ranks.

    Raises ``OSError``, ``DamagedFile`` and ``ValueError`` for the document, on all ranks.
    """

    def __init__(self, folder: Path, exchange: Exchange) -> None:
        self._folder = folder
        self.exchange = exchange
        text = zlib.decompress(exchange.from_first(lambda: zlib.compress(read_document(folder), 1)))
        exchange.together(self._check_shared)
        document = exchange.together(lambda: self._document(text))
        self.content = document.content
        self._metadata = document.metadata
        self._targets = LoadTargets(folder, document)

    def prepare(self, given: LoadArguments, half_read: set[str]) -> None:
        """Verify that the checkpoint fits, before anything is changed.

        Raises ``ValueError`` on all ranks for names, shapes, dtypes or groups that do not, and where the checkpoint
        lacks a name of ``half_read``, which were read from a damaged one.
        """
        model, optimizer = given.model, given.optimizer
        tensors = self.exchange.together(lambda: None if model is None else model_tensors(model))
        self.exchange.together(lambda: self._targets.prepare(given, tensors))
        if tensors is not None and given.strict:
            ties = self.content["ties"]
            of_model = [name.removeprefix(OF_MODEL) for name in tensors_of(self._metadata) if name.startswith(OF_MODEL)]
            self._check_known(
                [ties.get(name, name) for name in tensors.tensors],
                of_model,
                lambda others: (
                    f"{self._folder} has {others}, which the model does not have. Nothing was loaded; "
                    f"strict=False leaves them out."
                ),
            )
        if tensors is not None and optimizer is not None:
            names = tensors.names()
            if given.strict:
                own = [names[id(each)] for group in optimizer.param_groups for each in group["params"]]
                self._check_known(
                    own,
                    [name for group in self.content["optimizer"]["groups"] for name in group["names"]],
                    lambda others: (
                        f"the optimizer of {self._folder} has {others}, and this optimizer does not: make it with the "
                        f"parameters that were saved. Nothing was loaded; strict=False leaves their state out."
                    ),
                )
            self._warn_of_masters(optimizer, names)
            self._warn_of_left_out({"scheduler": given.scheduler, "grad_scaler": given.grad_scaler})
        if half_read:
            self.exchange.together(lambda: self._check_overwrites(half_read))

    def names_in_use(self) -> set[str]:
        """Names of the tensors that are read into memory in use: of the model, and master copies of an optimizer."""
        names = self._targets.tensors.keys() - self._targets.in_host_memory
        return {name for name in names if name.startswith("model.") or name.endswith(f".{MASTER}")}

    def read(self) -> Any:
        """Read this rank's part, take over the state, and return the user's content."""
        targets = self._targets
        shared = {name: targets.tensors[name] for name in sorted(targets.of_replicas)}
        described = repr([(name, each.described()) for name, each in shared.items()])
        reads = SharedReads(self.exchange, {name: each.nbytes for name, each in shared.items()}, described)
        self.exchange.together(lambda: self._read(reads))
        reads.send({name: [block.values for block in each.blocks] for name, each in shared.items()})
        self.exchange.together(targets.take_over)
        return targets.user_content

    def _document(self, text: bytes) -> Document:
        """The document, checked; rank 0 compares the sizes of all files too, before anything is allocated."""
        document = parsed_document(self._folder, text)
        if self.exchange.rank == 0:
            check_files(self._folder, document.metadata)
        return document

    def _check_overwrites(self, half_read: set[str]) -> None:
        left = sorted(half_read - self.names_in_use())
        if left:
            raise ValueError(
                f"{self._folder} lacks {left[0]} and {len(left) - 1} more that were read from a damaged checkpoint: "
                f"load a checkpoint with all names of the model."
            )

    def _check_shared(self) -> None:
        if not self._folder.is_dir():
            raise OSError(
                errno.ENOENT,
                f"rank {self.exchange.rank} on {socket.gethostname()} does not find {self._folder}, and rank 0 does: "
                f"it must be on a file system that all hosts share. Nothing was loaded",
            )

    def _check_known(self, own: list[str], saved: list[str], message: Callable[[str], str]) -> None:
        """Raise ``ValueError`` on all ranks for names of ``saved`` that are ``own`` on none."""

        def check(of_ranks: list[list[str]]) -> Sequence[None]:
            known = {name for names in of_ranks for name in names}
            others = [name for name in saved if name not in known]
            if others:
                raise ValueError(message(listed(others)))
            return [None] * len(of_ranks)

        self.exchange.through_first(own, check)

    def _warn_of_left_out(self, given: Mapping[str, Stateful | None]) -> None:
        """Warn on rank 0 of state that the training had and this load leaves out."""
        for name, one in given.items():
            if one is None and self.content[name] is not None and self.exchange.rank == 0:
                warnings.warn(
                    f"{self._folder} has the state of a {name}, which is not loaded: give {name}= too.",
                    stacklevel=4,
                )

    def _warn_of_masters(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Warn once, on rank 0, of master copies for which ``optimizer`` has no place."""
        states = self.content["optimizer"]["states"]
        left = [held.name for held in held_state(optimizer, names) if held.leaves_master(states.get(held.name, {}))]
        of_ranks = self.exchange.all_of(left)
        every = sorted({name for own in of_ranks for name in own})
        if every and self.exchange.rank == 0:
            warnings.warn(
                f"{self._folder} has float32 master copies of {listed(every)}, and the optimizer keeps none: they are "
                f"left out. The training goes on from rounded parameters and rounded state.",
                stacklevel=4,
            )

    def _read(self, reads: SharedReads[str]) -> None:
        own = {name: blocks for name, blocks in self._targets.tensors.items() if reads.is_here(name)}
        try:
            read_tensors(self._folder, self._metadata, own)
        except (DamagedFile, OSError) as error:
            if self.names_in_use():
                error.add_note(MIXED)
            raise


def read_tensors(folder: Path, metadata: Metadata, tensors: dict[str, TensorBlocks]) -> None:
    """Read saved rectangles into ``tensors`` by name, in the order of the files.

    Raises ``DamagedFile`` and ``OSError``.
    """
    spans: Mapping[MetadataIndex, FileSpan] = metadata.storage_data
    described = tensors_of(metadata)
    plan = create_default_local_load_plan(tensors, metadata)
    with ChecksummedReader(folder) as reader:
        for item in sorted(plan.items, key=lambda item: spans[item.storage_index][:2]):
            index = item.storage_index
            saved = described[index.fqn]
            assert index.index is not None, "the plan gives the place among the rectangles"
            shape, dtype = saved.chunks[index.index].sizes, saved.properties.dtype
            block = tensors[index.fqn].__get_tensor_shard__(item.dest_index)
            part = tuple(slice(at, at + size) for at, size in zip(item.dest_offsets, item.lengths, strict=True))
            read = partial(reader.read, spans[index])
            read_region(read, shape, dtype, item.storage_offsets, block[part], reader.wait)


def load_first_whole(folders: Sequence[Path], exchange: Exchange, given: LoadArguments) -> Any:
    """Load the first whole checkpoint of ``folders``, and return its user content; collective over all ranks.

    Raises ``DamagedFile`` if none of them is whole, and as ``Load`` does.
    """
    half_read: set[str] = set()
    for folder, is_last in zip(folders, [False] * (len(folders) - 1) + [True], strict=True):
        load = None
        try:
            load = Load(folder, exchange)
            load.prepare(given, half_read)
            return load.read()
        except Exception as error:
            # All ranks know the same kinds of errors: no rank continues by itself.
            are_damaged = bool(exchange.failures) and all(kind is DamagedFile for kind in exchange.failures)
            if are_damaged:
                keep_damaged(folder)
            if half_read and MIXED not in getattr(error, "__notes__", ()):
                error.add_note(MIXED)
            if is_last or not are_damaged:
                raise
            half_read |= load.names_in_use() if load is not None else set()
            if exchange.rank == 0:
                _logger.warning(
                    "%s: the next older checkpoint is loaded in the place of %s", str(error).rstrip("."), folder
                )
    raise AssertionError("there is a folder")
