"""Messages between two processes that share a kernel: one copy into shared memory, one copy out.

::

    sender     copy into a free slot ─▶ header into the pipe          never waits for the receiver
    memory     [flags of the slots | slots of 4 KiB | slots of 8 KiB ...]      one memfd for each way
    receiver   read headers until the tag is there ─▶ copy out ─▶ clear the slot's flag

The pipe is the doorbell, and its end is the notice that the other process has ended. A message without a slot has a
header too, and is sent by the caller's other means. So memory is bounded, and no message waits for a slot. Nothing has
a name: nothing is left in /dev/shm after any end. Pages are reserved first, so no copy ends in a SIGBUS. At a cgroup's
limit the reservation brings the OOM killer.

A sender that finds the pipe full takes the headers of all links of its process meanwhile. So ranks that all send before
they receive never wait for each other.

multiprocessing.shared_memory has names, which stay after a kill. Torch's shared storages need a new file and its
descriptor for each message. gloo's own transport goes through the kernel's sockets, with a thread on each side.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import select
import struct
import threading
from collections import defaultdict, deque
from weakref import WeakSet

import torch

from nxdpp.ranks.faults.waits import Wait

# Tag, bytes, slot, offset of the slot. A write of one header is atomic, so a read returns whole headers.
_HEADER = struct.Struct("=qqqq")
_READ_BYTES = 64 * _HEADER.size
_ELSEWHERE = -1
# Room for 8,192 headers; a user with many pipes gets 2,048 or 256. A sender that is so far ahead waits.
_PIPE_BYTES = 8192 * _HEADER.size
_LOOK_MILLISECONDS = 2  # while a sender waits

_FLAGS = 4096  # slots at most, a byte for each
ARENA_BYTES = 9 * 2**24
"""Addresses of one way of a link, for slots of all sizes; memory is taken for the slots that are used."""
_SMALLEST_SLOT = 4096
LARGEST_SLOT = 16 * 2**20
"""Bytes of the largest message; larger ones, such as pieces of weights, would take much memory."""
_POOL_SLOTS, _POOL_BYTES = 16, 4 * 2**20  # slots of a size: 16, and 4 MiB where they are small
_MOST_POOL_BYTES, _FEWEST_SLOTS = 16 * 2**20, 2  # the limit for large ones

_copy = ctypes.memmove
_FREE = b"\0"


class _Pool:
    """The slots of one size: ``first`` to ``end`` exist, ``last`` is their limit; ``memory`` of each is reserved."""

    def __init__(self, first: int, last: int, offset: int, size: int) -> None:
        self.first = self.end = first
        self.last = last
        self.offset = offset
        self.size = size
        self.memory = 0


_NO_POOL = _Pool(0, 0, 0, 0)


def slots_of(size: int) -> int:
    """Return how many messages of ``size`` bytes one way of a link has room for, at most."""
    rounded = _rounded(size)
    slots = min(max(_POOL_SLOTS, _POOL_BYTES // rounded), max(_FEWEST_SLOTS, _MOST_POOL_BYTES // rounded))
    return slots if rounded <= LARGEST_SLOT else 0


class SharedBuffer:
    """Memory that a process sends from, and the pipe of its headers; made by the sender.

    Attributes:
        memory: descriptor of the memory.
        reader: end of the pipe for the receiver.
        writer: end of the pipe for the sender.

    Raises ``OSError`` where there is no memfd, or too little memory.
    """

    def __init__(self) -> None:
        self.memory = self.reader = self.writer = -1
        try:
            self.memory = os.memfd_create("nxdpp")
            os.ftruncate(self.memory, ARENA_BYTES)
            os.posix_fallocate(self.memory, 0, _FLAGS + _SMALLEST_SLOT)
            self.reader, self.writer = os.pipe()
            os.set_blocking(self.writer, False)
            with contextlib.suppress(OSError):
                fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            self.map = mmap.mmap(self.memory, ARENA_BYTES)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all descriptors that no link has taken over."""
        descriptors = self.memory, self.reader, self.writer
        self.memory = self.reader = self.writer = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)


_LINKS: "WeakSet[HostLink]" = WeakSet()
"""Open links of this process."""


class HostLink:
    """Messages to and from another process of this host, matched by tags.

    Args:
        peer: global rank of the other process.
        own: the memory of sent messages; the link takes the descriptors over.
        memory: the memory of received messages.
        reader: the pipe of their headers, which the link closes.
    """

    def __init__(self, peer: int, own: SharedBuffer, memory: mmap.mmap, reader: int) -> None:
        self._peer = peer
        self._memory, self._writer, self._reader = own.memory, own.writer, reader
        own.memory = own.writer = -1
        own.close()
        self._sent, self._received = own.map, memory
        self._sent_at, self._received_at = map(_address, (own.map, memory))
        self._arrived: defaultdict[int, deque[tuple[int, int, int, int]]] = defaultdict(deque)
        # By the bytes of a message; and by the size of the slots.
        self._pools: dict[int, _Pool] = {}
        self._sized: dict[int, _Pool] = {}
        self._next_slot, self._next_offset = 0, _FLAGS
        # A thread may send while the main thread receives, and takes headers while it waits.
        self._sending, self._reading = threading.Lock(), threading.Lock()
        self._fence = None if platform.machine() in ("x86_64", "AMD64") else threading.Lock()
        _LINKS.add(self)

    def send(self, tensor: torch.Tensor, tag: int) -> bool:
        """Send the memory of a dense CPU ``tensor``, such as one of (B, T, H), which may be changed afterwards.

        Returns ``False`` where there is no slot for it: the caller then sends it, and ``receive`` tells the peer so.
        Raises ``RuntimeError`` if the peer has ended.
        """
        size = tensor.nbytes
        with self._sending:
            pool = self._pools.get(size) or self._pool_of(size)
            slot, offset = self._sent.find(_FREE, pool.first, pool.end), 0
            if slot >= 0 or (slot := self._new_slot(pool)) >= 0:
                offset = pool.offset + (slot - pool.first) * pool.size
                _copy(self._sent_at + offset, tensor.data_ptr(), size)
                self._sent[slot] = 1
            try:
                os.write(self._writer, _HEADER.pack(tag, size, slot, offset))
            except OSError as error:
                self._write_later(_HEADER.pack(tag, size, slot, offset), error)
        return slot >= 0

    def receive(self, tensor: torch.Tensor, tag: int) -> bool:
        """Wait for the next message of ``tag``, and copy it into the memory of a dense CPU ``tensor``.

        Returns ``False`` for a message that the peer sends by the caller's other means. Raises ``RuntimeError`` if the
        peer has ended, or has sent a different number of bytes.
        """
        arrived = self._arrived[tag]
        with self._reading:
            while not arrived:
                for header in _HEADER.iter_unpack(os.read(self._reader, _READ_BYTES) or self._raise_end()):
                    self._arrived[header[0]].append(header)
        _, size, slot, offset = arrived.popleft()
        if slot != _ELSEWHERE and size == tensor.nbytes:
            _copy(tensor.data_ptr(), self._received_at + offset, size)
            if self._fence is not None:
                self._order()
            self._received[slot] = 0
            return True
        if size != tensor.nbytes:
            raise RuntimeError(
                f"rank {self._peer} has sent a message of {size} bytes where {tensor.nbytes} bytes were expected: the "
                f"ranks are no longer in step"
            )
        return False

    def close(self) -> None:
        """Close the descriptors; the peer can still receive what was sent. A message after it raises ``OSError``."""
        descriptors = self._reader, self._writer, self._memory
        # Files that are opened later have the numbers.
        self._reader = self._writer = self._memory = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def _order(self) -> None:
        """Finish the reads of a slot before its flag is written: a lock that is taken twice orders both."""
        assert self._fence is not None
        for _ in range(2):
            with self._fence:
                pass

    def _pool_of(self, size: int) -> _Pool:
        """The pool of messages of ``size`` bytes, with memory for them in each of its slots."""
        rounded, slots = _rounded(size), slots_of(size)
        pool = self._sized.get(rounded) if slots else _NO_POOL
        if pool is None:
            first, offset = self._next_slot, self._next_offset
            pool = self._sized[rounded] = _Pool(first, first + slots, offset, rounded)
            self._next_slot += slots
            self._next_offset += slots * rounded
            assert self._next_slot <= _FLAGS, "slots of all sizes have flags"
            assert self._next_offset <= ARENA_BYTES, "slots of all sizes have addresses"
        if not all(self._reserve(pool, slot, size) for slot in range(pool.first, pool.end)):
            # There may be memory later.
            return _NO_POOL
        if pool is not _NO_POOL:
            pool.memory = max(pool.memory, size)
        self._pools[size] = pool
        return pool

    def _new_slot(self, pool: _Pool) -> int:
        """A further slot of ``pool``; ``_ELSEWHERE`` where there is no more."""
        if pool.end == pool.last or not self._reserve(pool, pool.end, pool.memory):
            return _ELSEWHERE
        pool.end += 1
        return pool.end - 1

    def _reserve(self, pool: _Pool, slot: int, size: int) -> bool:
        """Take memory for a slot; returns ``False`` where there is none."""
        try:
            os.posix_fallocate(self._memory, pool.offset + (slot - pool.first) * pool.size, max(size, 1))
        except OSError:
            return False
        return True

    def _write_later(self, header: bytes, error: OSError) -> None:
        """Write ``header`` once the full pipe has room; raises any other ``error``."""
        with Wait("P2P transfer", ranks=[self._peer]):
            while isinstance(error, BlockingIOError):
                for link in list(_LINKS):
                    link._drain()
                _is_ready(self._writer, select.POLLOUT, _LOOK_MILLISECONDS)
                try:
                    os.write(self._writer, header)
                    return
                except OSError as again:
                    error = again
        if isinstance(error, BrokenPipeError):
            self._raise_end()
        raise error

    def _drain(self) -> None:
        """Take the headers that have arrived, unless another thread reads."""
        if self._reading.acquire(blocking=False):
            try:
                while self._reader >= 0 and _is_ready(self._reader, select.POLLIN, 0):
                    for header in _HEADER.iter_unpack(os.read(self._reader, _READ_BYTES)):
                        self._arrived[header[0]].append(header)
            finally:
                self._reading.release()

    def _raise_end(self) -> bytes:
        raise RuntimeError(
            f"rank {self._peer} has ended: Connection closed by peer (messages through shared memory)"
        ) from None


def _close_links() -> None:
    """Close the links of a fork, such as a worker of a DataLoader: it would keep the pipes of an ended rank open."""
    for link in list(_LINKS):
        link.close()


os.register_at_fork(after_in_child=_close_links)


def _rounded(size: int) -> int:
    return max(_SMALLEST_SLOT, 1 << (size - 1).bit_length())


def _is_ready(descriptor: int, event: int, milliseconds: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return any(found & event for _, found in poll.poll(milliseconds))


def _address(memory: mmap.mmap) -> int:
    """Address of ``memory``, valid as long as the object lives."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
