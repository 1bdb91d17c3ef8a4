"""A device that runs late: a device type of torch whose kernels, copies and messages run when the host waits for them.

It has the rules of CUDA. Ranks are threads, each with a device of its own (``be_rank``) that has a compute stream. A
call on tensors returns before its kernel runs. Kernels of a stream run in their order. Streams run as late as possible:
only what the host waits for, and what that waits for. Freed memory goes to the next tensor of its size at once, with
its old content. So a missing wait, or memory that is freed too early, gives wrong numbers.

``install`` changes torch for the rest of the process: call it in a process of its own.
"""

import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from nxdpp.devices import kinds
from nxdpp.devices.device import Device, Stamp
from nxdpp.devices.kinds import Kind

NAME = "late"
_LIMIT_SECONDS = 120.0
_aten = torch.ops.aten
# Operations whose result decides what the host does next.
_ASK_THE_DEVICE = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten.masked_select.default,
    _aten.nonzero.default,
}


class Stream:
    """A queue of kernels; ``done`` of ``calls`` have run."""

    def __init__(self, sim: "Simulation") -> None:
        self.calls: list[Callable[[], Any] | None] = []
        self.done = 0
        self._sim = sim
        self._running = False

    def add(self, call: Callable[[], Any]) -> int:
        """Queue a kernel; return the number of calls up to it."""
        with self._sim.changed:
            self.calls.append(call)
            self._sim.changed.notify_all()
            return len(self.calls)

    def wait_for(self, other: "Stream", upto: int) -> None:
        """Queue a wait for the first ``upto`` calls of another stream."""
        self.add(lambda: other.run(upto))

    def run(self, upto: int) -> None:
        """Run the first ``upto`` calls."""
        with self._sim.changed:
            while self.done < upto:
                if self._running:
                    self._sim.wait_for(lambda: not self._running or self.done >= upto)
                    continue
                self._running = True
                call, self.calls[self.done] = self.calls[self.done], None
                assert call is not None
                try:
                    call()
                finally:
                    self._running = False
                    self.done += 1
                    self._sim.changed.notify_all()


class Simulation:
    """All late devices of the process.

    Attributes:
        changed: guards all state.
        waits: the waits of hosts for their device, by rank: the lines of code that asked for them.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.waits: dict[int, list[str]] = {}
        self._streams: dict[int, Stream] = {}
        self._free: dict[tuple[int, int], list[torch.UntypedStorage]] = {}

    def compute(self, rank: int) -> Stream:
        """Return the compute stream of a device."""
        with self.changed:
            return self._streams.setdefault(rank, Stream(self))

    def host_waits(self, rank: int, stream: Stream, upto: int) -> None:
        """Let the host wait for a stream, and note the line of code."""
        frames = [frame for frame in traceback.extract_stack() if "/nxdpp/" in frame.filename]
        at = frames[-1] if frames else traceback.extract_stack()[-4]
        self.waits.setdefault(rank, []).append(f"{at.filename}:{at.lineno} {at.line}")
        stream.run(upto)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until another thread has made ``condition`` true."""
        assert self.changed.wait_for(condition, _LIMIT_SECONDS), "deadlock"

    def allocate(self, rank: int, nbytes: int) -> "Memory":
        """Return memory that was freed, or new memory of not-a-numbers."""
        with self.changed:
            freed = self._free.get((rank, nbytes))
            if freed:
                return Memory(self, rank, freed.pop())
        storage = torch.UntypedStorage(nbytes)
        storage.fill_(255)  # type: ignore[attr-defined]
        return Memory(self, rank, storage)

    def free(self, rank: int, storage: torch.UntypedStorage) -> None:
        """Take memory back."""
        with self.changed:
            self._free.setdefault((rank, storage.nbytes()), []).append(storage)


class Memory:
    """Memory of a device; free when no tensor of the host refers to it."""

    def __init__(self, sim: Simulation, rank: int, storage: torch.UntypedStorage) -> None:
        self._sim = sim
        self._rank = rank
        self.storage = storage

    def __del__(self) -> None:
        self._sim.free(self._rank, self.storage)


SIM = Simulation()
DEVICE = torch.device("privateuseone", 0)
"""The device of each rank: torch has one of this type."""

_thread = threading.local()


def be_rank(rank: int) -> None:
    """Make this thread the host of ``rank``."""
    _thread.rank = rank


class LateTensor(torch.Tensor):
    """A tensor on a late device. ``raw`` is its content, which kernels read and write when they run."""

    raw: torch.Tensor
    memory: Memory
    rank: int

    @staticmethod
    def __new__(cls, raw: torch.Tensor, memory: Memory, rank: int) -> "LateTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=DEVICE,
        )
        tensor.raw, tensor.memory, tensor.rank = raw, memory, rank
        return tensor

    def __init__(self, *_: Any) -> None:
        pass

    def data_ptr(self) -> int:
        """Return the address of the content."""
        return self.raw.data_ptr()

    def untyped_storage(self) -> Any:
        """Return the memory of the content."""
        return self.raw.untyped_storage()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Queue the kernel of ``func``."""
        return _call(func, list(args), dict(kwargs or {}))


def empty(rank: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> LateTensor:
    """Return an uninitialised tensor of ``rank``."""
    extent = 1 + sum((s - 1) * step for s, step in zip(size, stride, strict=True)) if 0 not in size else 0
    memory = SIM.allocate(rank, max(extent, 1) * dtype.itemsize)
    raw = torch.empty(0, dtype=dtype).set_(memory.storage, 0, tuple(size), tuple(stride))
    return LateTensor(raw, memory, rank)


def _call(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, LateTensor)]
    rank = tensors[0].rank
    assert all(tensor.rank == rank for tensor in tensors), "ranks share no tensors"
    schema = func._schema
    if func is _aten._to_copy.default:
        return _copied(args[0], rank, **kwargs)
    if func in _ASK_THE_DEVICE:
        _wait(rank)
        return _wrapped(func(*_raw(args), **_raw(kwargs)), rank)
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        # Views are made on the host.
        raws = func(*_raw(args), **_raw(kwargs))
        return pytree.tree_map_only(torch.Tensor, lambda raw: LateTensor(raw, tensors[0].memory, rank), raws)
    _refuse_host_tensors(func, args, kwargs)
    stream = SIM.compute(rank)
    raw_args, raw_kwargs = _raw(args), _raw(kwargs)
    if schema.is_mutable:
        if func is _aten.copy_.default and not isinstance(args[0], LateTensor):
            # To the host.
            stream.add(lambda: raw_args[0].copy_(raw_args[1]))
            if not (len(args) > 2 and args[2]):
                _wait(rank)
            return args[0]
        if func is _aten.copy_.default and not isinstance(args[1], LateTensor):
            # From the host; a copy that blocks has read it when it returns.
            source = raw_args[1] if len(args) > 2 and args[2] else raw_args[1].clone()
            stream.add(lambda: raw_args[0].copy_(source))
            return args[0]
        stream.add(lambda: func(*raw_args, **raw_kwargs))
        if not schema.returns:
            return None
        named = dict(zip([argument.name for argument in schema.arguments], args, strict=False)) | kwargs
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        return named[written[0]] if len(schema.returns) == 1 else tuple(named[name] for name in written)
    if "device" in kwargs and kwargs["device"] is not None:
        raw_kwargs["device"] = torch.device("cpu")
    outputs = _like(func(*_meta(args), **_meta({**kwargs, **({"device": "meta"} if "device" in kwargs else {})})), rank)
    targets = [t.raw for t in pytree.tree_leaves(outputs) if isinstance(t, LateTensor)]

    def kernel() -> None:
        results = [t for t in pytree.tree_leaves(func(*raw_args, **raw_kwargs)) if isinstance(t, torch.Tensor)]
        for target, result in zip(targets, results, strict=True):
            target.copy_(result)

    stream.add(kernel)
    return outputs


def _copied(source: LateTensor, rank: int, **kwargs: Any) -> torch.Tensor:
    """Run ``source.to(...)`` to this device, another one or the host."""
    device = kwargs.get("device") or source.device
    dtype = kwargs.get("dtype") or source.dtype
    stream = SIM.compute(rank)
    raw = source.raw
    if device.type == NAME:
        stride = torch.empty_like(raw, device="meta").stride()
        target = empty(rank, raw.size(), stride, dtype)
        own = target.raw
        stream.add(lambda: own.copy_(raw))
        return target
    host = torch.full(raw.size(), float("nan") if dtype.is_floating_point else -1, dtype=dtype)
    stream.add(lambda: host.copy_(raw))
    if not kwargs.get("non_blocking"):
        _wait(rank)
    return host


def _wait(rank: int) -> None:
    stream = SIM.compute(rank)
    SIM.host_waits(rank, stream, len(stream.calls))


def _raw(tree: Any) -> Any:
    return pytree.tree_map_only(LateTensor, lambda tensor: tensor.raw, tree)


def _meta(tree: Any) -> Any:
    def meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")

    return pytree.tree_map_only(torch.Tensor, meta, tree)


def _like(tree: Any, rank: int) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: empty(rank, t.size(), t.stride(), t.dtype), tree)


def _wrapped(tree: Any, rank: int) -> Any:
    def wrapped(raw: torch.Tensor) -> LateTensor:
        tensor = empty(rank, raw.size(), raw.stride(), raw.dtype)
        tensor.raw.copy_(raw)
        return tensor

    return pytree.tree_map_only(torch.Tensor, wrapped, tree)


def _refuse_host_tensors(func: Any, args: Any, kwargs: Any) -> None:
    if func is _aten.copy_.default:
        return
    for tensor in pytree.tree_leaves((args, kwargs)):
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, LateTensor) and tensor.ndim:
            raise RuntimeError(f"{func}: expected all tensors on one device, found {tensor.device} and {NAME}")


class LateDevice(Device):
    """The interface of a late device; its clock counts kernels."""

    def stamp(self) -> Stamp:
        """Return an event."""
        stream = SIM.compute(_thread.rank)
        event: list[int] = []
        upto = stream.add(lambda: event.append(stream.done))
        return event, upto

    def between(self, start: Stamp, end: Stamp) -> int:
        """Return the number of calls between two events."""
        SIM.host_waits(_thread.rank, SIM.compute(_thread.rank), end[1])
        return int(end[0][0] - start[0][0])

    def origin(self) -> tuple[Stamp, int]:
        """Return an event at the end of all calls."""
        self.synchronize()
        return self.stamp(), 0

    def synchronize(self) -> None:
        """Run all calls."""
        _wait(_thread.rank)

    def to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Queue a copy to the host."""
        rank = _thread.rank
        host = torch.full(tensor.size(), -1, dtype=tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        stream = SIM.compute(rank)
        upto = len(stream.calls)

        def copied() -> torch.Tensor:
            SIM.host_waits(rank, stream, upto)
            return host

        return copied


class LateWork:
    """A message of a late communicator."""

    def __init__(self, rank: int, stream: Stream, upto: int) -> None:
        self._rank = rank
        self._stream = stream
        self._upto = upto

    def wait(self) -> None:
        """Let the compute stream wait for the message; the host goes on, as with NCCL."""
        SIM.compute(self._rank).wait_for(self._stream, self._upto)


class LateCommunicator:
    """A communicator of all ranks, for messages in one way: each rank runs its operations in the order of the calls."""

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {}
        self._sent: dict[tuple[int, int], list[tuple[int, list[torch.Tensor]]]] = {}
        self._received: dict[tuple[int, int], int] = {}

    def bound(self, rank: int) -> "LateGroup":
        """Return the communicator as ``rank`` calls it."""
        return LateGroup(self, rank)

    def send(self, rank: int, tensor: LateTensor, destination: int) -> LateWork:
        """Start to send; the content is read when the message runs."""
        stream = self._stream(rank)
        stream.wait_for(SIM.compute(rank), len(SIM.compute(rank).calls))
        content = tensor.raw
        with SIM.changed:
            # The content is read by the receive, or when the sender waits, whichever comes first.
            box: list[torch.Tensor] = []
            upto = stream.add(lambda: box.append(content.clone()))
            self._sent.setdefault((rank, destination), []).append((upto, box))
            SIM.changed.notify_all()
        return LateWork(rank, stream, upto)

    def recv(self, rank: int, tensor: LateTensor, source: int) -> LateWork:
        """Start to receive; the content is written when the message runs."""
        stream = self._stream(rank)
        stream.wait_for(SIM.compute(rank), len(SIM.compute(rank).calls))
        number = self._received.get((source, rank), 0)
        self._received[source, rank] = number + 1
        content = tensor.raw

        def receive() -> None:
            sent = self._sent.setdefault((source, rank), [])
            SIM.wait_for(lambda: len(sent) > number)
            upto, box = sent[number]
            self._stream(source).run(upto)
            content.copy_(box[0])

        return LateWork(rank, stream, stream.add(receive))

    def all_reduce(self, rank: int, tensor: LateTensor) -> LateWork:
        """Start a sum over two ranks that have the same tensor."""
        stream = self._stream(rank)
        stream.wait_for(SIM.compute(rank), len(SIM.compute(rank).calls))
        content = tensor.raw
        return LateWork(rank, stream, stream.add(lambda: content.mul_(2)))

    def _stream(self, rank: int) -> Stream:
        with SIM.changed:
            return self._streams.setdefault(rank, Stream(SIM))


class LateGroup:
    """A communicator as a process group of torch."""

    def __init__(self, communicator: LateCommunicator, rank: int) -> None:
        self._communicator = communicator
        self._rank = rank

    def send(self, tensors: list[Any], destination: int, tag: int) -> LateWork:
        """Start to send."""
        return self._communicator.send(self._rank, tensors[0], destination)

    def recv(self, tensors: list[Any], source: int, tag: int) -> LateWork:
        """Start to receive."""
        return self._communicator.recv(self._rank, tensors[0], source)


def install() -> None:
    """Add the device type to torch and to nxdpp, for the rest of the process, once."""
    assert NAME not in kinds.KINDS
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("aten", "IMPL")

    def new(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, *_: Any, **__: Any) -> LateTensor:
        like = torch.empty(size, dtype=dtype, device="meta")
        return empty(_thread.rank, like.size(), like.stride(), like.dtype)

    def strided(
        size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, *_: Any, **__: Any
    ) -> LateTensor:
        return empty(_thread.rank, size, stride, dtype or torch.get_default_dtype())

    library.impl("empty.memory_format", new, "PrivateUse1")
    library.impl("empty_strided", strided, "PrivateUse1")
    # The registration ends with the object.
    install.library = library  # type: ignore[attr-defined]
    kinds.KINDS[NAME] = Kind(LateDevice, "gloo")


@contextmanager
def no_waits(rank: int) -> Any:
    """Fail if the host of ``rank`` waits for its device in the block."""
    before = len(SIM.waits.get(rank, []))
    yield
    waits = SIM.waits.get(rank, [])[before:]
    assert not waits, "the host waited for the device in\n" + "\n".join(waits)
