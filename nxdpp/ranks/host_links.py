"""Links of this rank to the ranks of its pipeline on the same host, made at the start.

::

    rank 3 (higher)   connect to rank 1's socket, send memory and pipe     ▶  tell the store
    rank 1 (lower)    take them, answer with its own, or with none
    rank 3            confirm, or decline

A socket with an abstract name is reached only within one kernel and one network namespace: the connection shows that
memory can be shared, and a name of a host does not. Where either side cannot, both use gloo.
"""

import contextlib
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from itertools import combinations

from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not in its __all__

from nxdpp.ranks.faults.ending_process import print_line
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.host_link import HostLink, SharedBuffer
from nxdpp.schedules.lowering.transport_rules import neighbouring_pairs

_CHOICES = ("", "gloo", "shm")
# Up to this size all pairs of a pipeline are linked, and neighbours in larger ones: a link has five descriptors.
_ALL_PAIRS = 8
_YES, _NO = b"y", b"n"


def host_links(pipelines: Sequence[Sequence[int]], rank: int, store: Store) -> dict[int, HostLink]:
    """Return a link to each rank of this pipeline that shares the kernel, by the rank within the pipeline.

    Collective over all ranks. ``NXDPP_P2P=gloo`` makes none.

    Args:
        pipelines: the global ranks of each pipeline.
        rank: this global rank.
        store: store of this start.

    Raises:
        ValueError: for another value of ``NXDPP_P2P`` than ``gloo`` and ``shm``.
        RuntimeError: if a rank ends meanwhile.
    """
    choice = os.environ.get("NXDPP_P2P", "")
    if choice not in _CHOICES:
        raise ValueError(f"NXDPP_P2P is {choice!r}: set it to 'gloo' or 'shm', or leave it out for shared memory")
    (pipeline,) = (ranks for ranks in pipelines if rank in ranks)
    if len(pipeline) == 1:
        return {}
    own = pipeline.index(rank)
    with Wait("new process groups"):
        return _LinkStart(pipeline, own, store, choice != "gloo" and _can_share(rank)).links()


def _can_share(rank: int) -> bool:
    """Return whether this process can make shared memory; if not, one line says so."""
    try:
        SharedBuffer().close()
    except (AttributeError, OSError) as error:
        print_line(f"nxdpp: rank {rank} sends to ranks of its host over gloo, without shared memory: {error}")
        return False
    return True


class _LinkStart:
    """The start of one rank's links, in phases, of which none waits for a later phase of another rank."""

    def __init__(self, pipeline: Sequence[int], own: int, store: Store, can_share: bool) -> None:
        self._pipeline = pipeline
        self._own = own
        self._store = store
        self._can_share = can_share
        ranks = len(pipeline)
        pairs = list(combinations(range(ranks), 2)) if ranks <= _ALL_PAIRS else neighbouring_pairs(ranks)
        others = {sum(pair) - own for pair in pairs if own in pair}
        self._lower, self._higher = ([o for o in sorted(others) if (o > own) is higher] for higher in (False, True))

    def links(self) -> dict[int, HostLink]:
        with contextlib.ExitStack() as open_until_here:
            listener = open_until_here.enter_context(socket.socket(socket.AF_UNIX))
            name = self._listen(listener) if self._can_share else ""
            self._store.set(self._key(self._own), name)
            offers = {other: self._offer(other, open_until_here) for other in self._lower}
            links = self._accept(listener, name, open_until_here)
            for other, offer in offers.items():
                if offer is not None:
                    self._confirm(other, *offer, links)
            return links

    def _listen(self, listener: socket.socket) -> str:
        name = f"nxdpp-{secrets.token_hex(16)}"
        listener.bind(f"\0{name}")
        listener.listen(len(self._pipeline))
        return name

    def _offer(self, other: int, stack: contextlib.ExitStack) -> tuple[socket.socket, SharedBuffer] | None:
        """Connect to a lower rank, and send it this rank's memory; tells the store whether that was possible."""
        offer = None
        name = self._store.get(self._key(other)).decode()
        if name and self._can_share:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            with contextlib.suppress(OSError):
                own = SharedBuffer()
                try:
                    connection.connect(f"\0{name}")
                    hello = f"{name} {self._own}".encode()
                    socket.send_fds(connection, [hello], [own.memory, own.reader])
                    offer = connection, own
                finally:
                    if offer is None:
                        connection.close()
                        own.close()
        self._store.set(self._key(other, self._own), (_YES if offer else _NO).decode())
        return offer

    def _accept(self, listener: socket.socket, name: str, stack: contextlib.ExitStack) -> dict[int, HostLink]:
        """Answer the higher ranks that have connected, and return the links to those that confirm."""
        expected = {o for o in self._higher if self._store.get(self._key(self._own, o)) == _YES}
        answered: dict[int, tuple[socket.socket, SharedBuffer, mmap.mmap, int]] = {}
        while expected:
            connection = stack.enter_context(listener.accept()[0])
            theirs = _taken(connection, name, expected)
            if theirs is None:
                continue
            other, memory, reader = theirs
            expected.remove(other)
            try:
                shared, own = _mapped(memory), SharedBuffer()
            except OSError:
                os.close(reader)
                connection.sendall(_NO)
                continue
            socket.send_fds(connection, [_YES], [own.memory, own.reader])
            answered[other] = connection, own, shared, reader
        links = {}
        for other, (connection, own, shared, reader) in answered.items():
            if self._heard(connection.recv(1), other) == _YES:
                links[other] = HostLink(self._pipeline[other], own, shared, reader)
            else:
                own.close()
                os.close(reader)
        return links

    def _confirm(self, other: int, connection: socket.socket, own: SharedBuffer, links: dict[int, HostLink]) -> None:
        """Take the answer of a lower rank, and confirm it."""
        answer, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
        if self._heard(answer, other) == _NO:
            own.close()
            return
        memory, reader = descriptors
        try:
            shared = _mapped(memory)
        except OSError:
            os.close(reader)
            own.close()
            connection.sendall(_NO)
            return
        links[other] = HostLink(self._pipeline[other], own, shared, reader)
        connection.sendall(_YES)

    def _heard(self, answer: bytes, other: int) -> bytes:
        if not answer:
            raise RuntimeError(f"rank {self._pipeline[other]} has ended: Connection closed by peer")
        return answer

    def _key(self, *numbers: int) -> str:
        return f"nxdpp_p2p/{'/'.join(str(self._pipeline[number]) for number in numbers)}"


def _taken(connection: socket.socket, name: str, expected: set[int]) -> tuple[int, int, int] | None:
    """The rank, memory and pipe that a connection offers; ``None`` for a process that is none of the ``expected``."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if struct.unpack("=iII", credentials)[1] != os.getuid():
        return None
    hello, descriptors, _, _ = socket.recv_fds(connection, 256, 2)
    said, _, number = hello.decode(errors="replace").partition(" ")
    if said == name and number.isdecimal() and int(number) in expected and len(descriptors) == 2:
        memory, reader = descriptors
        return int(number), memory, reader
    for descriptor in descriptors:
        os.close(descriptor)
    return None


def _mapped(memory: int) -> mmap.mmap:
    """Map the memory of another process, and close its descriptor."""
    try:
        return mmap.mmap(memory, 0)
    finally:
        os.close(memory)
