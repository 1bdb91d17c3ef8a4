"""Links of this rank to the ranks of its pipeline on the same host, made at the start.

::

    rank 3 (higher)   connect to rank 1's socket, send memory and pipe     ▶  tell the store
    rank 1 (lower)    take them, answer with its own, or with none
    rank 3            confirm, or decline

A socket with an abstract name is reached only within one kernel and one network namespace: the connection shows that
memory can be shared, and a name of a host does not. Where either side cannot, both use gloo.
"""

import contextlib
import errno
import mmap
import os
import resource
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from itertools import combinations

from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not in its __all__

from nxdpp.ranks.faults.ending_process import print_line
from nxdpp.ranks.faults.waits import Wait, names
from nxdpp.ranks.host_link import ARENA_BYTES, HostLink, SharedBuffer
from nxdpp.schedules.lowering.transport_rules import neighbouring_pairs

_CHOICES = ("", "gloo", "shm")
# Up to this size all pairs of a pipeline are linked, and neighbours in larger ones: a link has five descriptors.
_ALL_PAIRS = 8
_YES, _NO = b"y", b"n"
_SECONDS = 300.0  # for the answer of a rank that runs
_MOST_OF_LIMIT = 0.1  # of ``ulimit -v``, for the addresses of links


def host_links(pipelines: Sequence[Sequence[int]], rank: int, store: Store) -> dict[int, HostLink]:
    """Return a link to each rank of this pipeline that shares the kernel, by the rank within the pipeline.

    Collective over all ranks. ``NXDPP_P2P=gloo`` makes none.

    Args:
        pipelines: the global ranks of each pipeline.
        rank: this global rank.
        store: store of this start.

    Raises:
        ValueError: for another value of ``NXDPP_P2P`` than ``gloo`` and ``shm``.
        RuntimeError: if a rank ends meanwhile, or does not answer.
    """
    choice = os.environ.get("NXDPP_P2P", "")
    if choice not in _CHOICES:
        raise ValueError(f"NXDPP_P2P is {choice!r}: set it to 'gloo' or 'shm', or leave it out for shared memory")
    (pipeline,) = (ranks for ranks in pipelines if rank in ranks)
    if len(pipeline) == 1:
        return {}
    own = pipeline.index(rank)
    with Wait("new process groups"):
        return _LinkStart(pipeline, own, store).links(choice != "gloo")


class _LinkStart:
    """The start of one rank's links, in phases, of which none waits for a later phase of another rank."""

    def __init__(self, pipeline: Sequence[int], own: int, store: Store) -> None:
        self._pipeline = pipeline
        self._own = own
        self._store = store
        ranks = len(pipeline)
        pairs = list(combinations(range(ranks), 2)) if ranks <= _ALL_PAIRS else neighbouring_pairs(ranks)
        others = {sum(pair) - own for pair in pairs if own in pair}
        self._lower, self._higher = ([o for o in sorted(others) if (o > own) is higher] for higher in (False, True))
        self._links: dict[int, HostLink] = {}
        # Closes at the end what no link has taken over.
        self._opened = contextlib.ExitStack()
        self._spare: list[int] = []

    def links(self, are_wanted: bool) -> dict[int, HostLink]:
        with self._opened:
            listener = self._listener() if are_wanted else None
            name = "" if listener is None else listener.getsockname()[1:].decode()
            self._store.set(self._key(self._own), name)
            offers = {other: self._offer(other, bool(name)) for other in self._lower}
            try:
                if listener is not None:
                    self._accept(listener, name)
                for other, offer in offers.items():
                    if offer is not None:
                        self._confirm(other, *offer)
            except BaseException:
                while self._links:
                    self._links.popitem()[1].close()
                raise
        return self._links

    def _listener(self) -> socket.socket | None:
        """A socket for the higher ranks. Without shared memory in this process it is ``None``, and one line says so."""
        try:
            self._check_limit()
            SharedBuffer().close()
            listener = self._opened.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(f"\0nxdpp-{secrets.token_hex(16)}")
            listener.listen(len(self._pipeline))
            listener.settimeout(_SECONDS)
            self._spare.append(os.dup(listener.fileno()))
            self._opened.callback(_close, self._spare)
        except (AttributeError, OSError) as error:
            print_line(
                f"nxdpp: rank {self._pipeline[self._own]} sends to ranks of its host over gloo, without shared memory: "
                f"{error}"
            )
            return None
        return listener

    def _check_limit(self) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        needed = 2 * ARENA_BYTES * (len(self._lower) + len(self._higher))
        if limit != resource.RLIM_INFINITY and needed > _MOST_OF_LIMIT * limit:
            raise OSError(f"it takes {needed >> 20} MiB of addresses, and ulimit -v allows {limit >> 20} MiB in all")

    def _offer(self, other: int, can_share: bool) -> tuple[socket.socket, SharedBuffer] | None:
        """Connect to a lower rank, and send it this rank's memory; tells the store whether that was possible."""
        offer = None
        name = self._store.get(self._key(other)).decode()
        if name and can_share:
            with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
                own = SharedBuffer()
                opened.callback(own.close)
                connection = opened.enter_context(socket.socket(socket.AF_UNIX))
                connection.settimeout(_SECONDS)
                connection.connect(f"\0{name}")
                if _is_of_this_user(connection):
                    socket.send_fds(connection, [f"{name} {self._own}".encode()], [own.memory, own.reader])
                    offer = connection, own
                    self._opened.enter_context(opened.pop_all())
        self._store.set(self._key(other, self._own), (_YES if offer else _NO).decode())
        return offer

    def _accept(self, listener: socket.socket, name: str) -> None:
        """Answer the higher ranks that have connected, and link those that confirm."""
        expected = {o for o in self._higher if self._store.get(self._key(self._own, o)) == _YES}
        answered: dict[int, socket.socket] = {}
        while expected:
            with self._talk_with(*expected):
                connection = self._accepted(listener)
            other, descriptors = self._taken(connection, name, expected)
            if other is not None:
                expected.remove(other)
                with self._talk_with(other):
                    self._answer(connection, other, descriptors)
            if other is None or other not in self._links:
                connection.close()
            else:
                answered[other] = connection
        for other, connection in answered.items():
            with self._talk_with(other):
                if _said(connection.recv(1)) != _YES:
                    self._links.pop(other).close()

    def _accepted(self, listener: socket.socket) -> socket.socket:
        """The next connection. Where this process may open no more files, it takes the place of the spare one."""
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            _close(self._spare)
            connection, _ = listener.accept()
        return self._opened.enter_context(connection)

    def _taken(self, connection: socket.socket, name: str, expected: set[int]) -> tuple[int | None, list[int]]:
        """The rank of a connection, with its memory and pipe if they can be used; ``None`` for another process."""
        # A rank sends before it tells the store. Another process may never do so.
        connection.setblocking(False)
        try:
            hello, descriptors = self._received(connection, 256)
        except OSError:
            return None, []
        connection.settimeout(_SECONDS)
        said, _, number = hello.decode(errors="replace").partition(" ")
        is_known = said == name and number.isdecimal() and int(number) in expected
        if not is_known or not _is_of_this_user(connection):
            _close(descriptors)
        return (int(number) if is_known else None), descriptors

    def _answer(self, connection: socket.socket, other: int, descriptors: list[int]) -> None:
        """Send a higher rank this rank's memory, or that there is no link."""
        try:
            memory, own = _mapped(descriptors), SharedBuffer()
        except OSError:
            _close(descriptors)
            connection.sendall(_NO)
            return
        self._opened.callback(own.close)
        socket.send_fds(connection, [_YES], [own.memory, own.reader])
        self._link(other, own, memory, descriptors)

    def _confirm(self, other: int, connection: socket.socket, own: SharedBuffer) -> None:
        """Take the answer of a lower rank, and confirm it."""
        with self._talk_with(other):
            answer, descriptors = self._received(connection, 1)
            if _said(answer) == _NO:
                return
            try:
                memory = _mapped(descriptors)
            except OSError:
                connection.sendall(_NO)
                return
            self._link(other, own, memory, descriptors)
            connection.sendall(_YES)

    def _link(self, other: int, own: SharedBuffer, memory: mmap.mmap, descriptors: list[int]) -> None:
        self._links[other] = HostLink(self._pipeline[other], own, memory, descriptors.pop())
        _close(descriptors)

    def _received(self, connection: socket.socket, size: int) -> tuple[bytes, list[int]]:
        """Receive up to ``size`` bytes with up to two descriptors, fewer where this process may open no more files."""
        said, descriptors, _, _ = socket.recv_fds(connection, size, 2, socket.MSG_CMSG_CLOEXEC)
        self._opened.callback(_close, descriptors)
        return said, descriptors

    @contextlib.contextmanager
    def _talk_with(self, *others: int) -> Iterator[None]:
        """Name ``others`` in errors of their connections."""
        ranks = names([self._pipeline[other] for other in sorted(others)])
        try:
            yield
        except ConnectionError:
            raise RuntimeError(f"{ranks} has ended: Connection closed by peer") from None
        except TimeoutError:
            raise RuntimeError(
                f"rank {self._pipeline[self._own]} has waited {_SECONDS:.0f} s for shared memory with {ranks}. "
                f"NXDPP_P2P=gloo starts without it."
            ) from None

    def _key(self, *numbers: int) -> str:
        return f"nxdpp_p2p/{'/'.join(str(self._pipeline[number]) for number in numbers)}"


def _said(answer: bytes) -> bytes:
    if not answer:
        raise ConnectionResetError
    return answer


def _is_of_this_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("=iII", credentials)[1] == os.geteuid()  # type: ignore[no-any-return]  # of struct


def _mapped(descriptors: list[int]) -> mmap.mmap:
    """Map the memory of another process, the first of its two ``descriptors``."""
    if len(descriptors) < 2:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return mmap.mmap(descriptors[0], 0)


def _close(descriptors: list[int]) -> None:
    """Close the descriptors, and empty the list."""
    while descriptors:
        os.close(descriptors.pop())
