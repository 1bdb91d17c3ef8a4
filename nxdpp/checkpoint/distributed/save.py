"""A save of all ranks: planned together, written by each rank, made to count by rank 0.

::

    all ranks    what each has ─▶ rank 0: rectangles of each rank ─▶ all ranks: write their files
    all ranks    places and checksums ─▶ rank 0: document, latest, removal of older checkpoints

A thread can write the files while the training continues::

    main thread    plan, copy to host memory ─▶ next steps ...                       error, if there was one
    thread                                   └▶ files, document, latest ─▶ done ────────┘

The ranks' threads exchange by a connection of their own. One save is in flight at a time.
"""

import errno
import gc
import itertools
import logging
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.captured import Captured, Described
from nxdpp.checkpoint.distributed.collective_call import KINDS
from nxdpp.checkpoint.distributed.content import content_of
from nxdpp.checkpoint.distributed.document import write_document
from nxdpp.checkpoint.distributed.pruning import ends_of, prune
from nxdpp.checkpoint.distributed.rectangles import key_of
from nxdpp.checkpoint.files.checksummed_writer import write_checksummed
from nxdpp.checkpoint.files.pieces import FileSpan
from nxdpp.devices.kinds import has_streams
from nxdpp.ranks.exchange import Exchange
from nxdpp.ranks.faults import background_errors
from nxdpp.ranks.faults.connection_errors import told

_logger = logging.getLogger(__name__)
_numbers = itertools.count()


class Save:
    """One save into ``folder``, whose name is the tag. Its methods are collective over all ranks, in their order.

    ``kept`` is the number of checkpoints to keep; ``None`` keeps all. After ``plan`` the exchange may be replaced by
    the exchange of another thread.
    """

    _needed = "the directory must be on a file system that all hosts share"
    _suffix = ".safetensors"

    def __init__(self, folder: Path, kept: int | None, exchange: Exchange) -> None:
        self.exchange = exchange
        self._folder = folder
        self._kept = kept
        # Of replicas with the same rectangle, the rank with the fewest bytes writes it.
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._plan = SavePlan([])
        self._name = ""
        # What this rank tells rank 0 of its file.
        self._told: Any = None
        # Of rank 0.
        self._content: dict[str, Any] = {}
        self._metadata = Metadata({})

    def plan(self, state: Captured) -> dict[str, torch.Tensor]:
        """Return the rectangles that this rank writes, by the keys of its file.

        Raises ``ValueError`` on all ranks if their states contradict each other or lack a part, and ``RuntimeError``
        if another program saves in the directory.
        """
        self._planner.set_up_planner(state.tensors)
        local = self._planner.create_local_plan()
        self._name, plan = self.exchange.through_first((local, state.described), self._plan_all)
        self._plan = self._planner.finish_plan(plan)
        found = {}
        for item in self._plan.items:
            values = state.tensors[item.index.fqn].__get_tensor_shard__(item.index)
            # A copy of only the memory would lose the conjugation of a view.
            found[key_of(item.index)] = values.resolve_conj().resolve_neg()
        return found

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write the values of ``plan``, and make the checkpoint count.

        Raises on all ranks ``OSError`` or ``ValueError`` of a rank that cannot write. Earlier checkpoints stay.
        """
        file = self._folder / directory.file_name(self._name, self.exchange.rank, self._suffix)
        try:
            spans = self.exchange.together(lambda: self._write_file(file, tensors))
        except Exception:
            self._remove(file)
            raise
        places = {item.index: spans[key_of(item.index)] for item in self._plan.items}
        counts, error = self.exchange.through_first((socket.gethostname(), places, self._told), self._finish)
        if not counts:
            self._remove(file)
        if error is not None:
            raise error if self.exchange.rank == 0 else told(error)

    def _write_file(self, file: Path, tensors: dict[str, torch.Tensor]) -> dict[str, FileSpan]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return self._write_values(file, tensors)
        except OSError as error:
            raise _cannot_write(error, self.exchange.rank, file) from error
        except BaseException:
            self._remove(file)
            raise

    def _write_values(self, file: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, FileSpan]:
        """Write ``tensors`` to the new ``file``, and return the place of each."""
        return write_checksummed(file, tensors) if tensors else {}

    def _write_documents(
        self, document: Path, number: int, spans: dict[MetadataIndex, FileSpan], told: list[Any]
    ) -> None:
        """On rank 0: write the document, which does not count yet, after what all ranks have ``told``."""
        write_document(document, number, self._content, self._metadata, spans)

    def _put_others(self) -> None:
        """On rank 0: right after the document counts, replace the other files that must name what it names."""

    def _claim(self) -> None:
        """On rank 0: lock the directory."""
        directory.claim(self._folder)

    def _remove(self, file: Path) -> None:
        """Remove what this rank has written of a save that does not count."""
        with suppress(OSError):
            file.unlink(missing_ok=True)
            self._folder.rmdir()

    def _plan_all(self, of_ranks: list[tuple[SavePlan, Described]]) -> Sequence[tuple[str, SavePlan]]:
        """On rank 0: divide the rectangles among the ranks, and lock the directory before any rank writes in it."""
        plans, self._metadata = self._planner.create_global_plan([plan for plan, _ in of_ranks])
        self._content = content_of([described for _, described in of_ranks])
        try:
            self._claim()
        except OSError as error:
            raise _cannot_write(error, 0, self._folder) from error
        name = secrets.token_hex(4)
        return [(name, plan) for plan in plans]

    def _finish(
        self, of_ranks: list[tuple[str, dict[MetadataIndex, FileSpan], Any]]
    ) -> Sequence[tuple[bool, Exception | None]]:
        """On rank 0: write the document, then ``latest``, then remove older checkpoints.

        Returns for each rank whether the checkpoint counts, and an error.
        """
        counts = False
        failed: Exception | None = None
        path, document = self._folder.parent, directory.new_document(self._folder, self._name)
        try:
            spans: dict[MetadataIndex, FileSpan] = {}
            for rank, (host, places, _) in enumerate(of_ranks):
                self._check_visible(rank, host, places)
                spans.update(places)
            self._write_documents(document, directory.next_number(path), spans, [told for _, _, told in of_ranks])
            directory.put_document(self._folder, self._name)
            counts = True
            self._put_others()
            directory.flush_directory(self._folder)
            directory.write_latest(path, self._folder.name)
            for error in prune(path, self._kept, self._folder.name, {span.file for span in spans.values()}):
                _logger.warning("%s is saved, and an older checkpoint cannot be removed: %s", self._folder, error)
        except OSError as error:
            failed = _cannot_name(error, self._folder) if counts else _cannot_write(error, 0, document)
        except Exception as error:
            failed = error
        if not counts:
            self._remove(document)
        return [(counts, failed)] * len(of_ranks)

    def _check_visible(self, rank: int, host: str, places: dict[MetadataIndex, FileSpan]) -> None:
        for file, end in ends_of(places).items():
            found = self._folder / file
            if not found.is_file():
                raise RuntimeError(
                    f"rank {rank} has written {found} on {host}, and rank 0 on {socket.gethostname()} does not find "
                    f"it: {self._needed}. No checkpoint was made."
                )
            if found.stat().st_size < end:
                raise OSError(errno.EIO, f"it has {found.stat().st_size} of {end} bytes", str(found))


def _cannot_name(error: OSError, folder: Path) -> OSError:
    """The error of a checkpoint that counts although ``latest`` does not name it."""
    return OSError(
        error.errno,
        f"rank 0 cannot write {error.filename or folder.parent / directory.LATEST}: {error.strerror or error}. "
        f"{folder} is saved: load_checkpoint with tag={folder.name!r} loads it, and without a tag an earlier one",
    )


def _cannot_write(error: OSError, rank: int, file: Path) -> OSError:
    """The error of a rank that cannot write ``file``, or a file next to it."""
    return OSError(
        error.errno,
        f"rank {rank} cannot write {error.filename or file}: {error.strerror or error}. Earlier checkpoints are there, "
        f"and the training can go on",
    )


class BackgroundSaves:
    """The background saves of a process, which its main thread starts."""

    def __init__(self) -> None:
        self._stager: DefaultStager | None = None
        self._thread: threading.Thread | None = None

    def start(self, save: Save, state: Captured) -> None:
        """Plan ``save``, copy its values, and write them in a thread; collective over all ranks.

        Waits for the previous save and raises its error. Also raises as ``Save.plan`` does.
        """
        self.wait()
        tensors = save.plan(state)
        staged = save.exchange.together(lambda: self._copied(tensors))
        save.exchange = Exchange(kinds=KINDS, thread=f"checkpoint_{next(_numbers)}")
        self._thread = threading.Thread(target=_write, args=(save, staged), name="nxdpp checkpoint")
        self._thread.start()

    def _copied(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy ``tensors`` to host memory, which the next copy reuses."""
        if self._stager is None:
            self._stager = _new_stager(tensors)
        try:
            staged = self._stager.stage(tensors)
        except AssertionError:
            # A tensor was resized since the last copy: that memory is too small or too large.
            self.close()
            self._stager = _new_stager(tensors)
            staged = self._stager.stage(tensors)
        assert isinstance(staged, dict)
        return staged

    def wait(self) -> None:
        """Wait for the save in flight, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        background_errors.raise_first()

    def close(self) -> None:
        """Free the memory of the copies."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None
            # The stager of torch 2.9 refers to itself by its methods, and holds the copies.
            gc.collect()


def _new_stager(tensors: Mapping[str, torch.Tensor]) -> DefaultStager:
    # Staging in another thread would copy values that the next step changes.
    on_device = any(has_streams(tensor.device.type) for tensor in tensors.values())
    return DefaultStager(StagingOptions(on_device, False, False, on_device))


def _write(save: Save, staged: dict[str, torch.Tensor]) -> None:
    try:
        save.write(staged)
    except Exception as error:
        # An error of one rank is raised in the threads of all ranks.
        background_errors.keep(error, save.exchange.gather)
