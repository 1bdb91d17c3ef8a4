"""One rank of a job of any size in this process: the other ranks are absent, and its device's tensors have no memory.

``lone_rank`` starts the groups of such a rank over torch's backend "fake", whose messages change nothing. Its device is
the fake accelerator (``fake_device``), with tensors of torch's ``FakeTensorMode``. So all code of nxdpp runs as on a
device with streams. What other ranks would say is supposed: they agree, and send hidden states and gradients.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._guards import active_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import import_utils

from nxdpp.agreement.step_verifier import StepVerifier
from nxdpp.initialization.allocation import with_type_of
from nxdpp.pipeline.local import initial_values
from nxdpp.pipeline.p2p.channel import RemoteChannel
from nxdpp.pipeline.p2p.layout import Boundary, TensorLayout, ValueLayout
from nxdpp.pipeline.p2p.transport import Transport
from nxdpp.ranks import current_state, parallel_state, process_groups, transfer_groups
from nxdpp.ranks.rank_mesh import RankMesh
from nxdpp.tracing.costs.cuda_modes import CudaKernels
from tests.support.fake_device import install

_aten = torch.ops.aten
_KIND = "fake"


class DeviceMemory(TorchDispatchMode):
    """Mode in which tensors of the device have no memory, and their bytes are counted; the host reads zeros.

    Attributes:
        now: bytes of the tensors that live, by the stream in which they were made.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.now: Counter[int] = Counter()
        self._most: Counter[int] = Counter()
        # By storage: its stream and bytes, and the reference whose callback frees them.
        self._held: dict[int, tuple[int, int, Any]] = {}

    @property
    def reserved(self) -> int:
        """Bytes of an allocator without fragments, which gives a stream's freed memory to the same stream only."""
        return self._most.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = torch.Tensor.__torch_dispatch__
        if any(each.__torch_dispatch__ is not plain and not issubclass(each, FakeTensor) for each in types):
            # A tensor subclass, whose parts come here.
            return NotImplemented
        # DTensor infers shapes with fake tensors of its own. torch asks a mode of them after all others.
        if active_fake_mode() is not None:
            return func(*args, **kwargs)
        fakes = any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs)))
        device = kwargs.get("device")
        if not fakes and (device is None or torch.device(device).type != _KIND):
            return func(*args, **kwargs)
        # The host reads zeros.
        if func is _aten._local_scalar_dense.default:
            return torch.zeros((), dtype=args[0].dtype).item()
        if func is _aten.copy_.default and not isinstance(args[0], FakeTensor):
            return args[0].zero_()
        if func is _aten._to_copy.default and device is not None and torch.device(device).type == "cpu":
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        with self._fakes:
            result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, FakeTensor) and leaf.device.type == _KIND:
                self.count(leaf.untyped_storage())
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count the memory of ``storage``, or its new size."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self._held:
            stream = torch.accelerator.current_stream().stream_id
            self._held[key] = stream, 0, weakref.ref(storage, lambda _: self._free(key))
        stream, before, reference = self._held[key]
        if size == before:
            return
        self._held[key] = stream, size, reference
        self.now[stream] += size - before
        self._most[stream] = max(self._most[stream], self.now[stream])

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count the new size of ``storage``, if it is counted."""
        if storage._cdata in self._held:
            self.count(storage)

    def _free(self, key: int) -> None:
        stream, size, _ = self._held.pop(key)
        self.now[stream] -= size


@contextlib.contextmanager
def lone_rank(mesh: RankMesh, pipeline: int, state: TensorLayout, whole: TensorLayout) -> Iterator[DeviceMemory]:
    """Act as the rank at place ``pipeline`` of the first replica and first in its tensor group, of a job of ``mesh``.

    Each boundary between stages has a value of layout ``state``, or the metadata of one of layout ``whole``. The block
    runs with the memory that it yields.
    """
    register()
    size = mesh.pipeline * mesh.data * mesh.tensor
    store = HashStore()
    # All others have made their groups.
    store.add("nxdpp_groups", size - 1)
    memory = DeviceMemory()
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, length: int) -> Any:
        result = resize(storage, length)
        memory.resized(storage)
        return result

    def layouts(boundary: Boundary) -> dict[str, ValueLayout]:
        named = dict.fromkeys(boundary.values, state) | dict.fromkeys(boundary.metadata_only, whole)
        return {name: ValueLayout(layout) for name, layout in named.items()}

    def received(channel: RemoteChannel) -> None:
        boundary = channel.boundary
        if not boundary.layouts:
            boundary.set_layouts(layouts(boundary))

    def described(channel: RemoteChannel) -> None:
        assert channel.boundary.layouts == layouts(channel.boundary), channel.boundary.layouts

    def gradients(transport: Transport, value: Any, *_: Any) -> None:
        assert value == [replace(state, requires_grad=False)], value

    capability = dist.Backend.backend_capability
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (process_groups, "own_group", _own_group),
            (transfer_groups, "own_group", _own_group),
            (import_utils, "is_fake_tensor", lambda _: False),
            (initial_values, "initial_weights", _initial_weights),
            (torch.UntypedStorage, "resize_", resized),
            (StepVerifier, "_receive", lambda *_: None),
            (RemoteChannel, "receive_metadata", received),
            (RemoteChannel, "send_metadata", described),
            (Transport, "send_object", gradients),
            (Transport, "receive_object", lambda *_: [state]),
        ):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(patch.dict(dist.Backend.default_device_backend_map, {_KIND: "fake"}))
        stack.enter_context(patch.dict(capability, {"fake": [*capability["fake"], _KIND]}))
        dist.init_process_group("fake", store=HashStore(), rank=mesh.rank_at(pipeline, 0, 0), world_size=size)
        stack.callback(parallel_state.destroy_model_parallel)
        current_state.replace(process_groups.build_groups(mesh, True, torch.device(_KIND, 0), store))
        stack.enter_context(memory)
        stack.enter_context(CudaKernels())
        yield memory


@cache
def register() -> torch.library.Library:
    """Register the device before the first backward of the process, and kernels that it has not, but CUDA has."""
    # They register the backend, and collectives of fake tensors.
    from torch.distributed._tools import fake_collectives  # noqa: F401
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    install()
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("silu_backward", lambda gradient, states: torch.empty_like(states), "PrivateUse1")
    return kernels


def _own_group(lists_of_ranks: list[list[int]], backend: str | None, limit: Any = None) -> Any:
    own = next((ranks for ranks in lists_of_ranks if dist.get_rank() in ranks), None)
    return None if own is None else dist.new_group(own, backend="fake", use_local_synchronization=True)


def _initial_weights(root: Any, metas: Any, *_: Any) -> tuple[list[torch.Tensor], bool]:
    return [with_type_of(torch.empty_like(meta.tensor, device=_KIND), meta.tensor) for meta in metas], False
