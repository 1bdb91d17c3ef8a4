"""A load of all ranks: each reads its own rectangles, whatever layout saved them.

::

    rank 0       reads the document ─▶ all ranks
    all ranks    verify names, shapes and groups ─▶ verify all that is read ─▶ give it to memory in use
    all ranks    send to replicas ─▶ take over the rest

A damaged checkpoint has changed nothing. It is named in a warning, and the next older one is loaded::

    step_30    damaged: its checksum differs on rank 2    all ranks: the next one
    step_20    whole

A load that fails later, because files change under it, leaves values of two origins: steps and saves are then refused.
"""

import errno
import logging
import socket
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from nxdpp.checkpoint.dcp.directory import has_dcp_files
from nxdpp.checkpoint.dcp.read_document import check_copies, dcp_document
from nxdpp.checkpoint.distributed.directory import DOCUMENT
from nxdpp.checkpoint.distributed.document import OF_MODEL, Document, parsed_document, read_document, tensors_of
from nxdpp.checkpoint.distributed.load_targets import LoadArguments, LoadTargets
from nxdpp.checkpoint.distributed.model_state import local_module_of, model_tensors
from nxdpp.checkpoint.distributed.optimizer_state import held_state
from nxdpp.checkpoint.distributed.optimizers import Optimizers, saved_optimizers
from nxdpp.checkpoint.distributed.parameter_groups import SavedGroup, check_divided, groups_of
from nxdpp.checkpoint.distributed.pruning import check_files, keep_damaged
from nxdpp.checkpoint.distributed.reads import VerifiedReads
from nxdpp.checkpoint.distributed.remote_directory import RemoteDirectory
from nxdpp.checkpoint.distributed.shared_reads import SharedReads
from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.checkpoint.files.pieces import listed
from nxdpp.devices.memory import free_host_memory
from nxdpp.pipeline.local import half_loaded
from nxdpp.ranks.exchange import Exchange
from nxdpp.ranks.faults import failure_watch

_logger = logging.getLogger(__name__)

MIXED = "The model has values of two origins now: steps and saves of it are refused until a load succeeds."


class Load:
    """One load, whose methods are collective in their order; all ranks raise the errors of the document.

    ``remote`` is the directory of ``folder`` in a store, which has the values. A directory of torch's is only asked for
    the state of an optimizer ``with_optimizer``.
    """

    def __init__(
        self,
        folder: Path,
        exchange: Exchange,
        remote: RemoteDirectory | None = None,
        with_optimizer: bool = False,
    ) -> None:
        self._folder, self._remote, self._with_optimizer = folder, remote, with_optimizer
        self.exchange = exchange
        found = exchange.from_first(self._found)
        self._is_of_torch = isinstance(found, Document)
        hosts = exchange.all_together(self._host)
        self._ranks_on_host = hosts.count(hosts[exchange.rank])
        document = exchange.together(lambda: self._document(found))
        self.content = document.content
        self._metadata = document.metadata
        self._targets = LoadTargets(folder, document)
        self._marked: list[object] = []

    def prepare(self, given: LoadArguments) -> None:
        """Verify that the checkpoint fits, before anything is changed.

        Raises ``ValueError`` on all ranks for names, shapes, dtypes or groups that do not, and where the checkpoint
        lacks a name that a failed load may have changed.
        """
        model, optimizers = given.model, given.optimizers
        tensors = self.exchange.together(lambda: None if model is None else model_tensors(model))
        self.exchange.together(lambda: self._targets.prepare(given, tensors))
        # A directory of torch's has a tied tensor under each of its names.
        others = tensors.ties if tensors is not None and self._is_of_torch else {}
        self.exchange.together(lambda: None if self.exchange.rank else check_copies(self._folder, others))
        if tensors is not None and given.strict:
            ties = self.content["ties"]
            of_model = [name.removeprefix(OF_MODEL) for name in tensors_of(self._metadata) if name.startswith(OF_MODEL)]
            self._check_known(
                [*(ties.get(name, name) for name in tensors.tensors), *others],
                of_model,
                lambda others: (
                    f"{self._folder} has {others}, which the model does not have. Nothing was loaded; "
                    f"strict=False leaves them out."
                ),
            )
        if tensors is not None and optimizers:
            names = tensors.names()
            groups = {name: groups_of(each, names) for name, each in optimizers.items()}
            if not self.content["optimizer"].get("flat"):
                self.exchange.through_first(groups, self._check_divided)
            if given.strict:
                self._check_known(
                    [name for each in groups.values() for group in each for name in group.names],
                    [name for group in self.content["optimizer"]["groups"] for name in group["names"]],
                    lambda others: (
                        f"the optimizer of {self._folder} has {others}, and this optimizer does not: make it with the "
                        f"parameters that were saved. Nothing was loaded; strict=False leaves their state out."
                    ),
                )
            self._warn_of_masters(optimizers, names)
            self._warn_of_left_out({"scheduler": given.scheduler, "grad_scaler": given.grad_scaler})
        self._marked = [] if model is None else [local_module_of(model), *optimizers.values()]
        self.exchange.together(self._check_overwrites)

    def _check_divided(self, of_ranks: Sequence[Mapping[str, list[SavedGroup]]]) -> Sequence[None]:
        """On rank 0: refuse groups that divide a saved one where the options differ, and warn of rates."""
        saved = saved_optimizers(self.content["optimizer"])
        for name in of_ranks[0]:
            groups = saved[name if name in saved else ""].groups
            rates = check_divided([of_rank[name] for of_rank in of_ranks], groups)
            if rates:
                warnings.warn(
                    f"{self._folder} has one rate for {' and '.join(rates)}, which are in groups with rates of their "
                    f"own here: the rate of the checkpoint counts, and a scheduler sets the next ones.",
                    stacklevel=6,
                )
        return [None] * len(of_ranks)

    def read(self) -> Any:
        """Read this rank's part, take over the state, and return the user's content.

        Raises ``DamagedFile`` and ``OSError`` before anything is changed. After a later error model and optimizer have
        the mark of ``half_loaded`` on all ranks.
        """
        targets = self._targets
        shared = {name: targets.tensors[name] for name in sorted(targets.of_replicas)}
        described = repr([(name, each.described()) for name, each in shared.items()])
        shares = SharedReads(self.exchange, {name: each.nbytes for name, each in shared.items()}, described)
        own = {name: blocks for name, blocks in targets.tensors.items() if shares.is_here(name)}
        # Half is left to whatever else the host runs.
        room = free_host_memory() // (2 * self._ranks_on_host)
        elsewhere = None if self._remote is None else self._remote.read

        def verified() -> VerifiedReads:
            reads = VerifiedReads(self._folder, self._metadata, own, targets.in_new_memory, room, elsewhere)
            reads.verify()
            return reads

        reads = self.exchange.together(verified)
        try:
            self.exchange.together(reads.apply)
            with failure_watch.reported():
                shares.send({name: [block.values for block in each.blocks] for name, each in shared.items()})
            self.exchange.together(targets.take_over)
        except BaseException as error:
            sentence = f"The load of {self._folder} failed midway ({type(error).__name__}: {error})."
            for each in self._marked:
                half_loaded.mark(each, sentence, self._names())
            raise
        for each in self._marked:
            half_loaded.clear(each)
        return targets.user_content

    def _names(self) -> set[str]:
        """Names of the tensors of the model: all other state is replaced by any load of its object."""
        return {name for name in self._targets.tensors if name.startswith(OF_MODEL)}

    def _found(self) -> bytes | Document:
        """The document, compressed, or the one of a directory that torch.distributed.checkpoint wrote."""
        if self._remote is not None:
            self._remote.fetch(self._folder / DOCUMENT)
        elif not (self._folder / DOCUMENT).is_file() and has_dcp_files(self._folder):
            return dcp_document(self._folder, self._with_optimizer)
        return zlib.compress(read_document(self._folder), 1)

    def _document(self, found: bytes | Document) -> Document:
        """The document, checked; rank 0 compares the sizes of all files too, before anything is allocated."""
        document = found if isinstance(found, Document) else parsed_document(self._folder, zlib.decompress(found))
        if self.exchange.rank == 0:
            check_files(self._folder, document.metadata)
        return document

    def _check_overwrites(self) -> None:
        for each in self._marked:
            left = sorted(half_loaded.half_load_of(each).names - self._names())
            if left:
                raise ValueError(
                    f"{self._folder} lacks {left[0]} and {len(left) - 1} more that a failed load may have changed: "
                    f"load a checkpoint with all names of the model."
                )

    def _host(self) -> str:
        if self._remote is None and not self._folder.is_dir():
            raise OSError(
                errno.ENOENT,
                f"rank {self.exchange.rank} on {socket.gethostname()} does not find {self._folder}, and rank 0 does: "
                f"it must be on a file system that all hosts share. Nothing was loaded",
            )
        return socket.gethostname()

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
                    f"{self._folder} has the state of a {name}, which is not loaded: give {name}= too.", stacklevel=4
                )

    def _warn_of_masters(self, optimizers: Optimizers, names: Mapping[int, str]) -> None:
        """Warn once, on rank 0, of master copies for which ``optimizer`` has no place."""
        states = self.content["optimizer"]["states"]
        every_held = [held for each in optimizers.values() for held in held_state(each, names)]
        left = [held.name for held in every_held if held.leaves_master(states.get(held.name, {}))]
        of_ranks = self.exchange.gather(left)
        every = sorted({name for own in of_ranks for name in own})
        if every and self.exchange.rank == 0:
            warnings.warn(
                f"{self._folder} has float32 master copies of {listed(every)}, and the optimizer keeps none: they are "
                f"left out. The training goes on from rounded parameters and rounded state.",
                stacklevel=4,
            )


def load_first_whole(
    folders: Sequence[Path], exchange: Exchange, given: LoadArguments, remote: RemoteDirectory | None = None
) -> Any:
    """Load the first whole checkpoint of ``folders``, and return its user content; collective over all ranks.

    With ``remote`` they stand for folders in a store.

    Raises ``DamagedFile`` if none of them is whole, and as ``Load`` does.
    """
    for folder, is_last in zip(folders, [False] * (len(folders) - 1) + [True], strict=True):
        try:
            load = Load(folder, exchange, remote, bool(given.optimizers))
            load.prepare(given)
            return load.read()
        except Exception as error:
            # All ranks know the same kinds of errors: no rank continues by itself.
            are_damaged = bool(exchange.failures) and all(kind is DamagedFile for kind in exchange.failures)
            if are_damaged:
                keep_damaged(folder)
            if given.model is not None and half_loaded.half_load_of(local_module_of(given.model)).names:
                error.add_note(MIXED)
            if is_last or not are_damaged:
                raise
            if exchange.rank == 0:
                _logger.warning(
                    "%s: the next older checkpoint is loaded in the place of %s", str(error).rstrip("."), folder
                )
    raise AssertionError("there is a folder")
